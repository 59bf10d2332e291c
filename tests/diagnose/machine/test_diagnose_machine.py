"""Fake machines: every check, with the value that makes it wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from frameworm.diagnose.machine.judge import judge_machine
from frameworm.diagnose.machine.variables import UNWANTED
from frameworm.records.machine import Check, GpuFacts, Intent, MachineFacts, PortFacts, StorageFacts

GIB = 2**30
GPU = GpuFacts(
    "NVIDIA H200",
    memory_bytes=140 * GIB,
    capability=9.0,
    used_bytes=GIB,
    throttle_reasons=(),
    temperature_c=40.0,
    nvlinks=18,
    pcie_width=16,
    pcie_width_max=16,
    pcie_generation_max=5,
    local_cpus=frozenset(range(8)),
)
DISK = StorageFacts("runs", True, None, 500 * GIB, 900e6, 2**27, "ext4")
HOST = MachineFacts(
    torch_version="2.13.0",
    cpus_total=16,
    cpus_bound=frozenset(range(16)),
    cpus_usable=16,
    governor="performance",
    load=0.5,
    torch_threads=16,
    memory_bytes=128 * GIB,
    memory_available_bytes=100 * GIB,
    shared_memory_bytes=64 * GIB,
    shared_memory_free_bytes=64 * GIB,
    open_files=(65536, 65536),
    locked_memory_bytes=-1,
    interfaces=("eth0", "lo"),
    host_resolves=True,
    host_is_loopback=False,
    compiler="/usr/bin/gcc",
    triton=True,
    storage=DISK,
    port=PortFacts(29500, True),
)
MACHINE = replace(
    HOST,
    torch_cuda="13.0",
    gpus=(GPU, GPU),
    nvidia_devices=2,
    driver="580.65.06",
    nvml=True,
    peer_access=True,
    nccl="2.28.9",
)
TWO = Intent(processes=2, on_gpu=True)
NODES = Intent(processes=2, nodes=2, on_gpu=True)


def judged(
    facts: MachineFacts, variables: dict[str, str] | None = None, intent: Intent | None = None
) -> dict[str, Check]:
    checks = judge_machine(facts, variables or {}, intent)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "names of checks are unique"
    for check in checks:
        assert check.found
        assert check.why or check.verdict == "ok"
        assert check.remedy or check.verdict in ("ok", "unknown"), check
    return found


def test_a_good_machine_is_ok() -> None:
    for facts, intent in ((MACHINE, Intent()), (HOST, Intent()), (MACHINE, TWO)):
        wrong = {
            n: c
            for n, c in judged(facts, {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"}, intent).items()
            if c.verdict != "ok"
        }
        assert set(wrong) <= {"threads"}, wrong


def test_a_machine_nobody_could_look_at_is_unknown_not_ok() -> None:
    checks = judged(MachineFacts())
    unknown = {name for name, check in checks.items() if check.verdict == "unknown"}
    assert {"cores", "cpu affinity", "threads", "memory", "shared memory", "open files", "run folder"} <= unknown
    assert {"rendezvous port", "host name", "other load"} <= unknown
    blind = judged(MachineFacts(gpus=(GpuFacts("X"), GpuFacts("X")), nvml=False, nccl="2"))
    for name in ("driver", "GPU memory", "clock throttling", "interconnect", "PCIe"):
        assert blind[name].verdict == "unknown", name
    assert "nvidia-ml-py" in blind["clock throttling"].remedy


def gpus(**changes: Any) -> dict[str, Any]:
    return {"gpus": (GPU, replace(GPU, **changes))}


WRONG: list[tuple[str, dict[str, Any], dict[str, str], Intent, str, str, str]] = [
    # check, changed facts, variables, intent, verdict, words found, words of the remedy
    ("GPUs", {"gpus": (), "torch_cuda": None}, {}, Intent(), "problem", "built without CUDA", "torch build"),
    ("GPUs", {"gpus": ()}, {"CUDA_VISIBLE_DEVICES": ""}, Intent(), "problem", "hidden", "unset"),
    ("GPUs", {"gpus": ()}, {}, Intent(), "problem", "torch sees none", "--gpus"),
    ("GPUs", {"gpus": (), "gpu_error": "CUDA unknown error"}, {}, Intent(), "problem", "unknown error", "nvidia-smi"),
    ("GPUs", {"gpus": (), "nvidia_devices": None, "driver": None}, {}, TWO, "problem", "none", "auto"),
    (
        "GPUs",
        {"gpus": (), "nvidia_devices": None, "driver": None},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        Intent(),
        "problem",
        "CUDA_VISIBLE_DEVICES=0,1 names",
        "unset",
    ),
    ("TORCH_CUDA_ARCH_LIST", {}, {"TORCH_CUDA_ARCH_LIST": "7.0;8.6"}, Intent(), "problem", "without 9", '"9.0"'),
    ("TORCH_CUDA_ARCH_LIST", {}, {"TORCH_CUDA_ARCH_LIST": "10.0+PTX"}, Intent(), "problem", "without 9", "unset"),
    ("TORCH_CUDA_ARCH_LIST", {}, {"TORCH_CUDA_ARCH_LIST": "Hopper"}, Intent(), "unknown", "Hopper", ""),
    ("GPUs", {}, {}, Intent(processes=3, on_gpu=True), "problem", "3 ranks", "at most 2"),
    ("driver", {"driver": "550.54.15"}, {}, Intent(), "problem", "550.54.15", "580"),
    ("driver", {"driver": "520.1", "torch_cuda": "12.8"}, {}, Intent(), "problem", "520", "525"),
    ("equal GPUs", gpus(name="NVIDIA L4"), {}, Intent(), "advice", "1 x NVIDIA L4", "one kind"),
    ("GPU memory", gpus(used_bytes=70 * GIB), {}, Intent(), "advice", "GPU 1 50%", "nvidia-smi"),
    ("clock throttling", gpus(throttle_reasons=("thermal (hardware)",)), {}, Intent(), "problem", "GPU 1", "cooling"),
    ("interconnect", gpus(nvlinks=0), {}, Intent(), "problem", "1 of 2", "nvlink"),
    ("interconnect", gpus(nvlinks=9), {}, Intent(), "problem", "9 to 18", "nvlink"),
    ("PCIe", gpus(pcie_width=4), {}, Intent(), "advice", "GPU 1 x4 of x16", "slot"),
    ("GPU packages", {"nvml": False, "triton": False}, {}, Intent(), "advice", "nvidia-ml-py", "install"),
    ("NCCL", {"nccl": None}, {}, Intent(), "problem", "not in this torch", "gloo"),
    ("cores", {"cpus_usable": 1}, {}, TWO, "problem", "1 usable", "at most 1"),
    ("cores", {"cpus_usable": 3}, {}, TWO, "advice", "3 usable", "per GPU"),
    ("cpu affinity", {"cpus_bound": frozenset({9, 10, 12})}, {}, Intent(), "advice", "9-10,12", "0-7"),
    ("cpu affinity", {"cpus_bound": frozenset({3}), "gpus": ()}, {}, Intent(), "advice", "1 of 16", "taskset"),
    ("cpu quota", {"cpu_quota": 0.5}, {}, Intent(), "problem", "0.5", "raise"),
    ("cpu quota", {"cpu_quota": 4.0, "quota_throttled_share": 0.3}, {}, Intent(), "advice", "30%", "raise"),
    ("threads", {"cpus_usable": 4}, {}, Intent(), "problem", "16 per process", "OMP_NUM_THREADS=4"),
    ("threads", {}, {"OMP_NUM_THREADS": "16"}, TWO, "problem", "16 per process x 2", "OMP_NUM_THREADS=8"),
    ("threads", {}, {"LOCAL_RANK": "0"}, TWO, "problem", "16 per process x 2", "OMP_NUM_THREADS=8"),
    ("threads", {"torch_threads": 1, "gpus": ()}, {}, Intent(), "advice", "1 per process", "OMP_NUM_THREADS=16"),
    ("cpu governor", {"governor": "powersave"}, {}, Intent(), "advice", "powersave", "performance"),
    ("other load", {"load": 12.0}, {}, Intent(), "advice", "12.0", "top"),
    ("memory", {"memory_available_bytes": 5 * GIB}, {}, Intent(), "advice", "5 GiB free", "--mem"),
    ("shared memory", {"shared_memory_free_bytes": 64 * 2**20}, {}, Intent(), "problem", "64 MiB", "--shm-size"),
    ("shared memory", {"shared_memory_free_bytes": GIB}, {}, TWO, "advice", "1 GiB", "--shm-size"),
    ("open files", {"open_files": (256, 65536)}, {}, Intent(), "problem", "256", "ulimit -n 65536"),
    ("open files", {"open_files": (1024, 65536)}, {}, Intent(), "advice", "1,024", "ulimit -n 65536"),
    ("C compiler", {"compiler": None}, {}, Intent(), "advice", "none", "gcc"),
    ("C compiler", {"compiler": None}, {}, Intent(compiles=True), "problem", "none", "gcc"),
    (
        "run folder",
        {"storage": StorageFacts("runs", False, "Permission denied")},
        {},
        Intent(),
        "problem",
        "Permission",
        "--out",
    ),
    ("run folder", {"storage": replace(DISK, free_bytes=2**20)}, {}, Intent(), "problem", "1 MiB", "checkpoint.keep"),
    ("run folder", {}, {}, Intent(checkpoint_bytes=200 * GIB, keep=3), "problem", "500 GiB free", "free 300 GiB"),
    (
        "run folder",
        {"storage": replace(DISK, write_bytes_per_s=20e6)},
        {},
        Intent(),
        "advice",
        "20 MB/s",
        "faster disk",
    ),
    ("run folder", {}, {}, Intent(checkpoint_bytes=90 * GIB), "advice", "takes 107.4 s", "every_steps"),
    ("run folder", {"storage": replace(DISK, filesystem="tmpfs")}, {}, Intent(), "advice", "tmpfs", "disk"),
    (
        "rendezvous port",
        {"port": PortFacts(29500, False, "Address already in use")},
        {},
        Intent(),
        "advice",
        "already",
        "MASTER_PORT",
    ),
    (
        "rendezvous port",
        {"port": PortFacts(1234, False, "Permission denied", True, True)},
        {},
        TWO,
        "problem",
        "1234",
        "MASTER_PORT",
    ),
    ("host name", {"host_resolves": False}, {}, Intent(), "advice", "cannot", "/etc/hosts"),
    ("host name", {"host_resolves": False}, {}, NODES, "problem", "cannot", "/etc/hosts"),
    ("host name", {"host_is_loopback": True}, {}, NODES, "problem", "loopback", "GLOO_SOCKET_IFNAME"),
    ("NCCL_SOCKET_IFNAME", {}, {"NCCL_SOCKET_IFNAME": "ib0"}, TWO, "problem", "no such", "eth0"),
    ("NCCL_SOCKET_IFNAME", {}, {"NCCL_SOCKET_IFNAME": "=eth"}, TWO, "problem", "no such", "eth0"),
    ("GLOO_SOCKET_IFNAME", {}, {"GLOO_SOCKET_IFNAME": "eth"}, TWO, "problem", "no such", "eth0"),
    ("GLOO_SOCKET_IFNAME", {}, {"GLOO_SOCKET_IFNAME": "lo"}, NODES, "problem", "lo", "no other machine"),
    ("interface", {"interfaces": ("eth0", "ib0", "lo")}, {}, NODES, "advice", "2", "ib0"),
    ("InfiniBand", {"infiniband": ("mlx5_0",)}, {"NCCL_IB_DISABLE": "1"}, TWO, "problem", "mlx5_0", "unset"),
    (
        "locked memory",
        {"infiniband": ("mlx5_0",), "locked_memory_bytes": 65536},
        {},
        TWO,
        "problem",
        "MiB",
        "ulimit -l",
    ),
    ("OMP_NUM_THREADS", {}, {}, TWO, "advice", "not set", "OMP_NUM_THREADS=8"),
    ("OMP_NUM_THREADS", {}, {"OMP_NUM_THREADS": "many"}, TWO, "problem", "many", "8"),
    ("OMP_NUM_THREADS", {}, {"OMP_NUM_THREADS": "0"}, Intent(), "problem", "0", "16"),
    ("OMP_NUM_THREADS", {}, {"OMP_NUM_THREADS": "9"}, TWO, "advice", "9", "OMP_NUM_THREADS=8"),
    ("NCCL_TIMEOUT", {}, {"NCCL_TIMEOUT": "soon"}, Intent(), "problem", "soon", "seconds"),
    ("NCCL_TIMEOUT", {}, {"NCCL_TIMEOUT": "5"}, Intent(), "advice", "5 s", "minute"),
    ("NCCL_DEBUG", {}, {}, TWO, "advice", "not set", "NCCL_DEBUG=WARN"),
    ("NCCL_DEBUG", {}, {"NCCL_DEBUG": "INFO"}, TWO, "advice", "INFO", "WARN"),
    ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", {}, {"TORCHELASTIC_MAX_RESTARTS": "3"}, TWO, "advice", "restarts", "=1"),
    ("PYTORCH_ALLOC_CONF", {}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:21"}, TWO, "advice", "21", "128"),
]


@pytest.mark.parametrize(
    ("name", "facts", "variables", "intent", "verdict", "found", "remedy"),
    WRONG,
    ids=[f"{case[0]}-{case[4]}-{index}" for index, case in enumerate(WRONG)],
)
def test_what_is_wrong_is_seen(
    name: str, facts: dict[str, Any], variables: dict[str, str], intent: Intent, verdict: str, found: str, remedy: str
) -> None:
    check = judged(replace(MACHINE, **facts), variables, intent)[name]
    assert check.verdict == verdict, check
    assert found in check.found, check
    assert remedy in check.remedy, check


ONE_GPU = {"gpus": (GPU,)}
CARDS = {"infiniband": ("mlx5_0",)}
# The same checks where a value is all right: check, changed facts, variables, intent, words found.
RIGHT: list[tuple[str, dict[str, Any], dict[str, str], Intent, str]] = [
    ("GPUs", ONE_GPU, {"CUDA_VISIBLE_DEVICES": "0"}, Intent(), "1 more hidden by CUDA_VISIBLE_DEVICES=0"),
    ("GPUs", {"nvidia_devices": None}, {"CUDA_VISIBLE_DEVICES": "0,1"}, Intent(), "2 x NVIDIA H200"),
    ("clock throttling", {"gpus": (replace(GPU, throttle_reasons=("power cap",)),)}, {}, Intent(), "power limit"),
    ("clock throttling", {}, {}, Intent(), "none (at this moment"),
    ("cores", {}, {}, Intent(), "16 usable of 16"),
    ("cores", {}, {}, TWO, "16 usable of 16 for 2 ranks"),
    ("cpu affinity", {}, {}, Intent(), "all 16 cores"),
    ("cpu affinity", {"cpus_bound": frozenset({0, 1})}, {}, Intent(), "bound to 2 of 16 cores (0-1)"),
    ("cpu quota", {"cpu_quota": 4.0, "quota_throttled_share": 0.01}, {}, Intent(), "1% of periods"),
    ("cpu quota", {"cpu_quota": 4.0}, {}, Intent(), "4 cores"),
    ("threads", {}, {}, TWO, "8 for each of 2 ranks, if frameworm starts them"),
    ("threads", {"torch_threads": 16}, {}, Intent(), "16 per process on 16 cores"),
    ("threads", {"torch_threads": 16, "gpus": ()}, {}, Intent(), "16 per process on 16 cores"),
    ("InfiniBand", CARDS, {"NCCL_IB_DISABLE": "0"}, TWO, "mlx5_0"),
    ("locked memory", CARDS, {}, TWO, "no limit"),
    ("NCCL_TIMEOUT", {}, {"NCCL_TIMEOUT": "600"}, Intent(), "600 s"),
    ("PYTORCH_ALLOC_CONF", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, TWO, "expandable_segments:True"),
    ("TORCH_CUDA_ARCH_LIST", {}, {"TORCH_CUDA_ARCH_LIST": "8.0 9.0a"}, Intent(), "9.0a"),
    ("TORCH_CUDA_ARCH_LIST", {}, {"TORCH_CUDA_ARCH_LIST": "7.0+PTX"}, Intent(), "7.0+PTX"),
    ("left from debugging", {}, {}, Intent(on_gpu=False), "nothing"),
]


@pytest.mark.parametrize(
    ("name", "facts", "variables", "intent", "found"), RIGHT, ids=[f"{i}-{case[0]}" for i, case in enumerate(RIGHT)]
)
def test_what_is_right_is_ok(
    name: str, facts: dict[str, Any], variables: dict[str, str], intent: Intent, found: str
) -> None:
    check = judged(replace(MACHINE, **facts), variables, intent)[name]
    assert check.verdict == "ok", check
    assert found in check.found, check


def test_one_gpu_has_no_company() -> None:
    checks = judged(replace(MACHINE, nccl=None, **ONE_GPU))
    assert not {"interconnect", "equal GPUs"} & set(checks)
    assert checks["NCCL"].verdict == "unknown", "one GPU needs none"


def test_the_run_folder_tells_what_is_known() -> None:
    unmeasured = judged(replace(MACHINE, storage=StorageFacts("runs", True, filesystem="ext4")))["run folder"]
    assert (unmeasured.verdict, unmeasured.found) == ("unknown", "runs (ext4)")
    slow = replace(DISK, write_bytes_per_s=20e6)
    assert "all of them see" not in judged(replace(MACHINE, storage=slow))["run folder"].remedy
    shared = replace(slow, filesystem="nfs4")
    assert "all of them see" in judged(replace(MACHINE, storage=shared))["run folder"].remedy


def test_packages_are_named_one_by_one() -> None:
    assert "triton" not in judged(replace(MACHINE, nvml=False))["GPU packages"].found
    assert "nvidia-ml-py" not in judged(replace(MACHINE, triton=False))["GPU packages"].found
    assert "triton" in judged(replace(MACHINE, triton=False))["GPU packages"].found


def test_every_check_is_made_wrong_once() -> None:
    """A check that no case above turns from ok would pass with its rule deleted."""
    names = set(judged(MACHINE, {}, TWO)) | set(judged(HOST))
    assert names - {case[0] for case in WRONG} == {"launch variables", "left from debugging"}


@pytest.mark.parametrize("rule", UNWANTED, ids=lambda rule: rule.name)
def test_unwanted_variables(rule: Any) -> None:
    value = next(iter(sorted(rule.values)), "ring")
    check = judged(MACHINE, {rule.name: value}, replace(TWO, compiles=True))[rule.name]
    assert check.verdict == rule.verdict
    assert check.found == value
    harmless = "0" if "0" not in rule.values else "1"
    if rule.values:
        assert (
            rule.name not in judged(MACHINE, {rule.name: harmless, "NCCL_DEBUG": "WARN"}, replace(TWO, compiles=True))
            or rule.name == "NCCL_DEBUG"
        )


def test_unwanted_variables_of_gpus_do_not_matter_on_a_cpu() -> None:
    variables = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1"}
    checks = judged(HOST, variables)
    assert not set(checks) & set(variables)
    assert checks["left from debugging"].verdict == "ok"
    assert "left from debugging" not in judged(HOST, {"OMP_NUM_THREADS": "many"})


def test_what_is_right_by_its_circumstances() -> None:
    # A rendezvous on another machine cannot be tried here.
    other = replace(MACHINE, port=PortFacts(29500, None, None, False, True))
    assert judged(other)["rendezvous port"].verdict == "ok"
    # srun binds each task to its own cores: they are not shared by the ranks.
    bound = replace(MACHINE, cpus_bound=frozenset(range(2)), cpus_usable=2, torch_threads=2)
    four = Intent(processes=4, on_gpu=False)
    assert judged(bound, {"SLURM_CPUS_PER_TASK": "2", "SLURM_PROCID": "0"}, four)["cores"].verdict == "ok"
    assert judged(bound, {"SLURM_PROCID": "0"}, four)["cores"].verdict == "problem"
    # Told which interface to use, nobody asks for the host's name.
    nameless = replace(MACHINE, host_resolves=False)
    assert judged(nameless, {"GLOO_SOCKET_IFNAME": "eth0"}, NODES)["host name"].verdict == "ok"
    # A power limit under load is how such cards are run.
    capped = replace(MACHINE, gpus=(replace(GPU, throttle_reasons=("power cap",)),))
    assert judged(capped)["clock throttling"].verdict == "ok"
    # GPUs without NVLink are no fault, but worth a word.
    plain = replace(GPU, nvlinks=0)
    beside = judged(replace(MACHINE, gpus=(plain, plain)))["interconnect"]
    assert (beside.verdict, beside.found) == ("advice", "PCIe")
    assert "host memory" in judged(replace(MACHINE, gpus=(plain, plain), peer_access=False))["interconnect"].why
    # NCCL takes prefixes and exclusions.
    for value in ("eth", "=eth0", "^docker"):
        assert judged(MACHINE, {"NCCL_SOCKET_IFNAME": value}, TWO)["NCCL_SOCKET_IFNAME"].verdict == "ok"


def test_contradicting_launch_variables_are_a_problem_and_named() -> None:
    checks = judge_machine(MACHINE, {}, TWO, ["SLURM_NTASKS=4 but SLURM_NPROCS=2"])
    check = next(check for check in checks if check.name == "launch variables")
    assert check.verdict == "problem"
    assert check.found == "SLURM_NTASKS=4 but SLURM_NPROCS=2"
    several = judge_machine(MACHINE, {}, TWO, ["one", "two"])
    assert next(check.found for check in several if check.name == "launch variables") == "(1) one. (2) two."
