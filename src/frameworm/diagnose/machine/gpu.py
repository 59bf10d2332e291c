"""Checks of GPUs, their driver, clocks and interconnect."""

from __future__ import annotations

from collections.abc import Mapping

from frameworm.records.machine import Check, GpuFacts, Intent, MachineFacts

GROUP = "GPUs"

# Minimum driver of each CUDA major version, from NVIDIA's "CUDA Compatibility", table of minor version compatibility.
MINIMUM_DRIVERS = {11: 450, 12: 525, 13: 580}
# Words from hardware/nvml.py. Cards run at the power cap under load by design; other reasons lower the clock further.
HARMLESS_THROTTLING = {"power cap", "sync boost"}
HELD_BY_OTHERS = 0.05
CONTEXT_BYTES = 2**30  # querying torch for its GPUs may create a context by itself


def gpu_checks(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> list[Check]:
    """Return all checks of GPUs; without GPUs, that there are none."""
    checks: list[Check | None] = [_gpus(facts, variables, intent), _driver(facts)]
    if facts.gpus:
        checks += [_same_gpus(facts), _gpu_memory(facts), _throttling(facts), _interconnect(facts), _slots(facts)]
        checks += [_packages(facts)]
    checks.append(_nccl(facts, intent))
    return [check for check in checks if check is not None]


def _gpus(facts: MachineFacts, variables: Mapping[str, str], intent: Intent) -> Check:
    name, why = "GPUs", "training takes one process per GPU; with none it runs on the CPU"
    shown = variables.get("CUDA_VISIBLE_DEVICES")
    if facts.gpus:
        found = f"{len(facts.gpus)} x {facts.gpus[0].name}" if _alike(facts.gpus) else _listed(facts.gpus)
        if intent.on_gpu is not False and intent.processes > len(facts.gpus):
            remedy = f"start at most {len(facts.gpus)} processes here (--nproc-per-node), or use gpu.device: cpu"
            return Check(name, GROUP, f"{found} for {intent.processes} ranks", "problem", remedy, why)
        hidden = (facts.nvidia_devices or 0) - len(facts.gpus)
        if hidden > 0 and shown is not None:
            found += f"; {hidden} more hidden by CUDA_VISIBLE_DEVICES={shown}"
            return Check(name, GROUP, found, "ok", "", why)
        return Check(name, GROUP, found, "ok", "", why)
    there = bool(facts.nvidia_devices) or facts.driver is not None
    if facts.gpu_error:
        return Check(name, GROUP, facts.gpu_error, "problem", "see nvidia-smi and the kernel's log (dmesg)", why)
    if there and facts.torch_cuda is None:
        remedy = "install a torch build with CUDA (pytorch.org/get-started)"
        return Check(name, GROUP, "there, but torch is built without CUDA", "problem", remedy, why)
    if there and shown is not None:
        found = f"hidden by CUDA_VISIBLE_DEVICES={shown!r}"
        return Check(name, GROUP, found, "problem", "unset CUDA_VISIBLE_DEVICES, or name the GPUs to use", why)
    if there:
        remedy = "see nvidia-smi; in a container: docker run --gpus all; under SLURM: --gpus-per-node"
        return Check(name, GROUP, "the driver is there, but torch sees none", "problem", remedy, why)
    if shown not in (None, "", "-1") and intent.on_gpu is not False:
        found = f"none, though CUDA_VISIBLE_DEVICES={shown} names some"
        remedy = (
            "run on a machine with a GPU (nvidia-smi lists them), or unset CUDA_VISIBLE_DEVICES to train on the CPU"
        )
        return Check(name, GROUP, found, "problem", remedy, why)
    if intent.on_gpu:
        remedy = "run on a machine with a GPU, or set gpu.device: auto"
        return Check(name, GROUP, "none, and one is asked for", "problem", remedy, why)
    return Check(name, GROUP, "none: training runs on the CPU", "ok", "", why)


def _driver(facts: MachineFacts) -> Check | None:
    why = "torch's CUDA needs a driver of its own generation or later"
    if facts.driver is None:
        if not facts.gpus:
            return None
        return Check("driver", GROUP, "version not known", "unknown", "", why)
    found = facts.driver + (f", torch built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "")
    major, cuda = _first_number(facts.driver), _first_number(facts.torch_cuda)
    minimum = MINIMUM_DRIVERS.get(cuda) if cuda is not None else None
    if major is None or minimum is None:
        return Check("driver", GROUP, found, "unknown" if facts.torch_cuda else "ok", "", why)
    if major < minimum:
        remedy = f"update the driver to {minimum} or later, or install torch for an older CUDA"
        return Check("driver", GROUP, found, "problem", remedy, why)
    return Check("driver", GROUP, found, "ok", "", why)


def _same_gpus(facts: MachineFacts) -> Check | None:
    if len(facts.gpus) < 2:
        return None
    why = "every step ends with the slowest rank (straggler)"
    if _alike(facts.gpus):
        return Check("equal GPUs", GROUP, "all of one kind", "ok", "", why)
    remedy = "use GPUs of one kind: gpu.device_ids or CUDA_VISIBLE_DEVICES"
    return Check("equal GPUs", GROUP, _listed(facts.gpus), "advice", remedy, why)


def _gpu_memory(facts: MachineFacts) -> Check:
    why = "memory used by other programs is not available for training, and they use computing time too"
    told = [(index, gpu.used_bytes, gpu.memory_bytes) for index, gpu in enumerate(facts.gpus)]
    known = [(index, used, total) for index, used, total in told if used is not None and total]
    if not known:
        return Check("GPU memory", GROUP, "use not known", "unknown", _install_nvml(facts), why)
    taken = [
        f"GPU {index} {used / total:.0%} taken"
        for index, used, total in known
        if used > max(HELD_BY_OTHERS * total, CONTEXT_BYTES)
    ]
    if taken:
        remedy = "see nvidia-smi for the programs, or choose another GPU (gpu.device_ids)"
        return Check("GPU memory", GROUP, ", ".join(taken), "advice", remedy, why)
    return Check("GPU memory", GROUP, "free", "ok", "", why)


def _throttling(facts: MachineFacts) -> Check:
    why = "a GPU below its clock is slower in proportion (throttled)"
    told = [(i, gpu) for i, gpu in enumerate(facts.gpus) if gpu.throttle_reasons is not None]
    if not told:
        return Check("clock throttling", GROUP, "not known", "unknown", _install_nvml(facts), why)
    bad = [(i, gpu, [w for w in gpu.throttle_reasons or () if w not in HARMLESS_THROTTLING]) for i, gpu in told]
    words = [
        f"GPU {index}: {', '.join(reasons)}" + (f" at {gpu.temperature_c:.0f} C" if gpu.temperature_c else "")
        for index, gpu, reasons in bad
        if reasons
    ]
    if words:
        remedy = "see cooling, power supply and nvidia-smi -q -d PERFORMANCE; use other GPUs until it is fixed"
        return Check("clock throttling", GROUP, "; ".join(words), "problem", remedy, why)
    if any(gpu.throttle_reasons for _, gpu in told):
        return Check("clock throttling", GROUP, "at the power limit, as under load", "ok", "", why)
    return Check("clock throttling", GROUP, "none (at this moment; runs watch it all the time)", "ok", "", why)


def _interconnect(facts: MachineFacts) -> Check | None:
    if len(facts.gpus) < 2:
        return None
    why = "gradients of every step pass here (communication_bound)"
    links = [gpu.nvlinks for gpu in facts.gpus]
    remedy = "parallel.compression: auto measures whether fewer bytes pay; frameworm network shows what the links give"
    if all(link is None for link in links) and facts.peer_access is None:
        return Check("interconnect", GROUP, "not known", "unknown", _install_nvml(facts), why)
    if any(links) and not all(links):
        found = f"NVLink on {sum(bool(link) for link in links)} of {len(links)} GPUs"
        return Check("interconnect", GROUP, found, "problem", "see nvidia-smi nvlink -s; a link may be down", why)
    if all(links):
        fewest, most = min(link or 0 for link in links), max(link or 0 for link in links)
        found = f"NVLink, {most} links per GPU" if fewest == most else f"NVLink, {fewest} to {most} links per GPU"
        if fewest != most:
            return Check("interconnect", GROUP, found, "problem", "see nvidia-smi nvlink -s; a link may be down", why)
        return Check("interconnect", GROUP, found, "ok", "", why)
    if facts.peer_access is False:
        found = "PCIe, without direct access between GPUs"
        return Check("interconnect", GROUP, found, "advice", remedy, why + "; copies pass through host memory")
    return Check("interconnect", GROUP, "PCIe", "advice", remedy, why)


def _slots(facts: MachineFacts) -> Check:
    why = "batches come through the slot, and without NVLink gradients too (transfer_bound)"
    told = [
        (index, gpu.pcie_width, gpu.pcie_width_max)
        for index, gpu in enumerate(facts.gpus)
        if gpu.pcie_width and gpu.pcie_width_max
    ]
    if not told:
        return Check("PCIe", GROUP, "not known", "unknown", _install_nvml(facts), why)
    # Only the width, because the generation drops while a GPU is idle.
    narrow = [f"GPU {index} x{width} of x{widest}" for index, width, widest in told if width < widest]
    if narrow:
        remedy = "seat the card in a full slot, or see the board's lane sharing"
        return Check("PCIe", GROUP, ", ".join(narrow), "advice", remedy, why)
    generation = facts.gpus[told[0][0]].pcie_generation_max
    found = f"x{told[0][1]}" + (f", generation {generation}" if generation else "")
    return Check("PCIe", GROUP, found, "ok", "", why)


def _packages(facts: MachineFacts) -> Check:
    why = "nvidia-ml-py lets runs watch clocks and memory; triton compiles kernels"
    missing = []
    if facts.nvml is False:
        missing.append("nvidia-ml-py (pip install 'frameworm[gpu]')")
    if facts.triton is False:
        missing.append("triton (comes with torch's CUDA builds)")
    if missing:
        return Check("GPU packages", GROUP, "missing: " + ", ".join(missing), "advice", "install what is missing", why)
    return Check("GPU packages", GROUP, "there", "ok", "", why)


def _nccl(facts: MachineFacts, intent: Intent) -> Check | None:
    why = "NCCL moves gradients between GPUs; gloo in its place goes through the host"
    wanted = intent.on_gpu is not False and bool(facts.gpus)
    if facts.nccl is not None:
        return Check("NCCL", GROUP, facts.nccl, "ok", "", why)
    if not wanted:
        return None
    if len(facts.gpus) > 1 or intent.world_size > 1:
        remedy = "install a torch build with NCCL; parallel.backend: gloo works and is slower"
        return Check("NCCL", GROUP, "not in this torch", "problem", remedy, why)
    return Check("NCCL", GROUP, "not in this torch", "unknown", "", why + "; one GPU needs none")


def _install_nvml(facts: MachineFacts) -> str:
    return "pip install nvidia-ml-py" if facts.nvml is False else ""


def _alike(gpus: tuple[GpuFacts, ...]) -> bool:
    return len({(gpu.name, gpu.memory_bytes) for gpu in gpus}) == 1


def _listed(gpus: tuple[GpuFacts, ...]) -> str:
    names = [gpu.name for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _first_number(text: str | None) -> int | None:
    head = (text or "").split(".")[0]
    return int(head) if head.isdigit() else None
