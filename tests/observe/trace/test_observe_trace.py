"""The trace reader, on traces made by hand whose every microsecond is known, and on real ones of the CPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kineto import Trace
from torch import nn
from torch.utils.data import DataLoader, Dataset

from frameworm.errors import DataError
from frameworm.observe.trace import events as trace_events
from frameworm.observe.trace.device import matmul_kind
from frameworm.observe.trace.intervals import Intervals
from frameworm.observe.trace.kinds import kind_of_operator
from frameworm.observe.trace.read import read_trace
from frameworm.records.trace import WAIT_CAUSES, TraceSummary
from frameworm.report.run.trace_text import render_trace

NANOSECOND = 1e-9


def read(tmp_path: Path, trace: Trace, **header: Any) -> TraceSummary:
    summary = read_trace(trace.write(tmp_path / "trace.json", **header))
    for device in summary.devices:
        assert set(device.waits_s) == set(WAIT_CAUSES)
        assert device.compute_s + sum(device.waits_s.values()) == pytest.approx(device.wall_s, abs=NANOSECOND)
        assert device.busy_s + device.idle_s == pytest.approx(device.wall_s, abs=NANOSECOND)
    return summary


def waits(summary: TraceSummary) -> dict[str, float]:
    """Microseconds by cause, without the zeros."""
    assert summary.device is not None
    found = {cause: round(time_s * 1e6, 2) for cause, time_s in summary.device.waits_s.items()}
    return {cause: time for cause, time in found.items() if time}


def test_a_full_queue_has_no_host_wait(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(3, 0, 1000)
    for index in range(9):
        trace.launch("gemm", 10 * index, 5 + 100 * index, 105 + 100 * index)
    trace.launch("gemm", 95, 910, 1000)
    summary = read(tmp_path, trace)
    assert summary.device is not None
    assert summary.device.busy_s == pytest.approx(990e-6)
    # The first launch begins after 5 us, so that is what a launch takes; the gap of 5 us before the last was no host's.
    assert waits(summary) == {"host": 5.0, "queued": 5.0}
    assert summary.device.name == "NVIDIA H200"


def test_a_late_host_is_a_host_wait(tmp_path: Path) -> None:
    """Tiny kernels: each is launched when the one before has long ended; the launch itself takes 5 us."""
    trace = Trace()
    trace.step(0, 0, 1000)
    for index in range(50):
        trace.launch("tiny", 20 * index, 20 * index + 5, 20 * index + 8)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"host": 850.0}
    assert summary.kernels is not None
    assert summary.kernels.count == summary.kernels.tiny_count == 50
    assert summary.kernels.mean_s == pytest.approx(3e-6)
    assert summary.launches is not None
    assert summary.launches.lag_median_s == pytest.approx(5e-6)
    assert summary.launches.queue_mean == pytest.approx(0.25)
    assert summary.launches.queue_empty_share == pytest.approx(0.75)


def test_time_in_the_loader_is_data_loading(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 200)
    trace.span("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 50, 700)
    trace.launch("gemm", 720, 720, 1000)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"data_loading": 500.0, "host": 20.0}
    assert summary.host.data_loading_s == pytest.approx(650e-6)
    assert summary.steps[0].data_loading_s == pytest.approx(650e-6)


def test_a_synchronisation_costs_what_the_host_lost_in_it(tmp_path: Path) -> None:
    """Without .item() at 20 the host would have come 280 us earlier, and the device would not have run dry."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 290)
    trace.operator("aten::item", 20, 300)
    trace.operator("aten::_local_scalar_dense", 21, 300)
    trace.call("cudaStreamSynchronize", 20, 300)
    trace.launch("gemm", 450, 450, 1000)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"synchronisation": 160.0}
    assert summary.host.synchronisation_s == pytest.approx(280e-6)


def test_a_short_synchronisation_explains_no_long_wait(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 100)
    trace.call("cudaStreamSynchronize", 70, 110)
    trace.launch("gemm", 600, 600, 1000)
    assert waits(read(tmp_path, trace)) == {"synchronisation": 40.0, "host": 460.0}


def test_what_was_lost_in_a_wait_is_missing_in_every_gap_until_it_is_made_up(tmp_path: Path) -> None:
    """100 us lost at first: gaps of 40, 40 and 40 us later are 100 us of it and 20 us of a host that is slow anyway."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 150)
    trace.call("cudaStreamSynchronize", 50, 150)
    for start in (190, 330, 470):
        trace.launch("gemm", start, start, start + 100)
    trace.launch("gemm", 480, 570, 1000)
    assert waits(read(tmp_path, trace)) == {"synchronisation": 100.0, "host": 20.0}


def test_a_copy_that_comes_back_when_it_is_over_has_waited(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 400)
    trace.copy("DtoH (Device -> Pageable)", 10, 400, 410, call_us=405)
    trace.launch("gemm", 600, 600, 1000)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"transfer": 10.0, "synchronisation": 190.0}


def test_a_queue_that_is_always_full_says_nothing_about_launches(tmp_path: Path) -> None:
    """Every kernel begins 5 ms after its launch; the gaps between them are not the host's for that."""
    trace = Trace()
    for index in range(100):
        trace.launch("gemm", 100 * index, 100 * index + 5000, 100 * index + 5090)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"queued": 990.0}


def test_a_launch_that_waits_for_nobody_on_the_host_is_queued(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 100)
    trace.launch("gemm", 10, 400, 1000)
    assert waits(read(tmp_path, trace)) == {"queued": 300.0}


def test_copies_beside_and_without_compute(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("gemm", 0, 0, 500)
    trace.copy("HtoD (Pinned -> Device)", 0, 400, 600, stream=20, size=2_000_000)
    trace.copy("HtoD (Pageable -> Device)", 0, 600, 700, stream=20, size=500_000)
    trace.copy("DtoD (Device -> Device)", 0, 700, 800)
    trace.launch("Memset (Device)", 0, 800, 810, category="gpu_memset", call="cudaMemsetAsync", bytes=64)
    trace.launch("gemm", 0, 810, 1000)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"transfer": 200.0}
    assert summary.device is not None
    assert summary.device.transfer_s == pytest.approx(300e-6)
    assert summary.device.streams == 2
    kinds = {(item.direction, item.source): item for item in summary.copies}
    assert kinds["HtoD", "Pinned"].bytes == 2_000_000
    assert kinds["HtoD", "Pageable"].time_s == pytest.approx(100e-6)
    assert kinds["memset", None].count == 1
    assert summary.copies[0].source == "Pinned"
    text = render_trace(summary)
    assert "HtoD Pinned to Device: 1 in 200 us, 1.91 MiB at 10 GB/s" in text


def test_communication_hidden_and_exposed(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("sgemm", 0, 0, 600)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 300, 900, stream=16)
    trace.launch("adam", 6, 900, 1000)
    summary = read(tmp_path, trace)
    assert summary.device is not None
    assert waits(summary) == {"communication": 300.0}
    assert summary.device.communication_s == pytest.approx(600e-6)
    assert summary.device.communication_hidden_share == pytest.approx(0.5)
    assert summary.kernels is not None
    assert summary.kernels.communication_count == 1
    assert summary.steps[0].communication_exposed_s == pytest.approx(300e-6)
    assert "50.0% of it hidden behind compute" in render_trace(summary)


def test_a_captured_graph_is_one_launch(tmp_path: Path) -> None:
    """The gaps within a graph are not the host's; the one before it is."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.launch("first", 0, 10, 100, call="cudaGraphLaunch")
    trace.launch("again", 500, 510, 600, call="cudaGraphLaunch")
    number = trace.events[-3]["args"]["correlation"]
    trace.span("kernel", "inner", 620, 1000, 7, 0, device=0, stream=7, correlation=number)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"host": 420.0, "queued": 20.0}
    assert summary.launches is not None
    assert summary.launches.count == 2


def test_what_the_device_had_left_after_the_last_step_counts(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.launch("gemm", 0, 0, 400)
    summary = read(tmp_path, trace)
    assert summary.wall_s == pytest.approx(400e-6)
    assert waits(summary) == {}


@pytest.mark.parametrize("earlier", [False, True])
def test_a_host_far_ahead_does_not_make_the_device_idle(tmp_path: Path, earlier: bool) -> None:
    """Recording begins while the device works on steps launched before, which the trace does not show."""
    trace = Trace()
    for number in range(3):
        trace.span("user_annotation", f"ProfilerStep#{number}", 100 * number, 100 * number + 100)
        begun = 5000 + 1000 * number
        trace.span("gpu_user_annotation", f"ProfilerStep#{number}", begun, begun + 900, 7, 0)
        trace.launch("gemm", 100 * number + 10, begun, begun + 900)
    if earlier:  # launched while the profiler warmed up: the call is not in the trace
        trace.span("kernel", "gemm", 4500, 4990, 7, 0, device=0, stream=7, correlation=1)
    summary = read(tmp_path, trace)
    assert summary.device is not None
    assert summary.device.wall_s == pytest.approx(2900e-6)
    assert waits(summary) == {"queued": 200.0}
    assert [round((step.device_wall_s or 0) * 1e6) for step in summary.steps] == [1000, 1000, 900]
    assert [round((step.idle_s or 0) * 1e6) for step in summary.steps] == [100, 100, 0]
    assert [round(step.wall_s * 1e6) for step in summary.steps] == [100, 100, 100]
    assert any("leave out the first 5 ms" in note for note in summary.notes)


def test_several_devices_and_steps(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(4, 0, 500)
    trace.step(5, 500, 1000)
    trace.launch("gemm", 0, 0, 450)
    trace.launch("gemm", 500, 500, 1000)
    trace.launch("gemm", 0, 0, 100, device=1)
    summary = read(tmp_path, trace, distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8})
    assert [device.device for device in summary.devices] == [0, 1]
    assert [(step.step, step.kernels) for step in summary.steps] == [(4, 2), (5, 1)]
    assert summary.steps[0].idle_s == pytest.approx(50e-6)
    assert summary.steps[1].busy_s == pytest.approx(500e-6)
    assert (summary.rank, summary.world_size) == (3, 8)
    assert "rank 3 of 8" in render_trace(summary)


def test_a_trace_without_launches_names_no_cause(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("kernel", "gemm", 0, 100, 7, 0, device=0, stream=7, correlation=5)
    trace.span("kernel", "gemm", 200, 300, 7, 0, device=0, stream=7, correlation=6)
    summary = read(tmp_path, trace)
    assert waits(summary) == {"unknown": 100.0}
    assert summary.launches is None
    assert any("no launches" in note for note in summary.notes)


def test_operators_own_their_kernels_time_and_memory(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.span("user_annotation", "forward", 0, 300)
    trace.operator("aten::linear", 10, 200)
    trace.operator("aten::addmm", 20, 150)
    trace.memory(30, 4096, 8192)
    trace.launch("ampere_sgemm_128x64_tn", 100, 110, 500, call_us=10)
    trace.memory(120, -1024, 7168)
    trace.operator("aten::relu", 210, 250)
    trace.memory(220, 512, 7680)
    trace.launch("elementwise", 230, 500, 520)
    trace.operator("aten::mul", 100, 400, tid=2)
    trace.launch("elementwise", 150, 520, 530, tid=2)
    trace.launch("bare", 600, 605, 615)
    summary = read(tmp_path, trace)
    by_device = {item.name: round((item.device_s or 0) * 1e6, 1) for item in summary.operators_by_device}
    assert by_device == {"aten::addmm": 390.0, "aten::relu": 20.0, "aten::mul": 10.0, "cudaLaunchKernel": 10.0}
    by_cpu = {item.name: round((item.self_cpu_s or 0) * 1e6, 1) for item in summary.operators_by_cpu}
    assert by_cpu["aten::linear"] == 60.0
    assert by_cpu["aten::addmm"] == 120.0
    assert by_cpu["aten::mul"] == 298.0
    assert by_cpu["cudaLaunchKernel"] == 16.0
    memory = {item.name: (item.allocated_bytes, item.net_bytes) for item in summary.operators_by_memory}
    assert memory == {"aten::addmm": (4096, 3072), "aten::relu": (512, 512)}
    assert summary.peak_device_bytes == 8192
    assert [(item.name, item.operators) for item in summary.threads] == [("thread 2", 1), ("thread 1 (main)", 3)]
    assert summary.kernels is not None
    assert summary.kernels.matmul_s == {"fp32": pytest.approx(390e-6)}
    assert [item.name for item in summary.ranges] == ["forward"]
    assert "100.0% fp32 without tensor cores" in render_trace(summary)


def test_a_collective_across_operators_does_not_disturb_their_nesting(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.operator("aten::mm", 0, 400)
    trace.span("user_annotation", "gloo:all_reduce", 300, 900)
    trace.operator("aten::add", 410, 500)
    trace.span("user_annotation", "gloo:all_gather", 950, 5000)  # cut off when the profiler stopped
    summary = read(tmp_path, trace)
    assert {item.name: round((item.self_cpu_s or 0) * 1e6) for item in summary.operators_by_cpu} == {
        "aten::mm": 400,
        "aten::add": 90,
    }
    assert summary.host.communication_s == pytest.approx(650e-6)
    assert summary.host.communication_exposed_s == pytest.approx(460e-6)
    assert [round((item.total_s or 0) * 1e6) for item in summary.ranges] == [600, 50]
    assert summary.device is None
    assert summary.operators_by_cpu[0].device_s is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)", "fp32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8", "fp32"),
        ("void gemmSN_TN_kernel<float, 128, 16>(cublasGemmSmallNParams)", "fp32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_tn_align4>(Params)", "tf32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32", "tf32"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "tensor_core"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "tensor_core"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "tensor_core"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)", "tensor_core"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)", None),
        ("triton_poi_fused_gelu_0", None),
    ],
)
def test_units_are_guessed_from_kernel_names(name: str, kind: str | None) -> None:
    assert matmul_kind(name) == kind


def busy_trace() -> Trace:
    trace = Trace()
    trace.step(0, 0, 1000)
    for index in range(40):
        trace.operator(f"aten::é{index}", 20 * index, 20 * index + 10)
        trace.launch("gemm", 20 * index + 2, 20 * index + 5, 20 * index + 20)
    return trace


def test_plain_gzipped_bare_and_in_small_pieces_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = busy_trace()
    expected = read(tmp_path, trace).to_dict()
    trace.write(tmp_path / "trace.json.gz")
    (tmp_path / "bare.json").write_text("\ufeff " + json.dumps(trace.events))
    parts = trace.text().encode()
    (tmp_path / "parts.gz").write_bytes(gzip.compress(parts[:5000]) + gzip.compress(parts[5000:]))
    monkeypatch.setattr(trace_events, "PIECE_BYTES", 61)
    for name in ("trace.json", "trace.json.gz", "parts.gz", "bare.json"):
        found = read_trace(tmp_path / name).to_dict()
        if name == "bare.json":
            found["devices"][0]["name"] = "NVIDIA H200"  # stands in the header, which a bare list has not
        assert found | {"source": ""} == expected | {"source": ""}, name


def test_a_summary_survives_json(tmp_path: Path) -> None:
    summary = read(tmp_path, busy_trace())
    assert TraceSummary.from_dict(json.loads(json.dumps({**summary.to_dict(), "later": 1}))) == summary


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_short_is_read_up_to_there(tmp_path: Path, packed: bool) -> None:
    data = busy_trace().text().encode()
    whole = read(tmp_path, busy_trace())
    data = gzip.compress(data)[:-200] if packed else data[: len(data) * 2 // 3]
    path = tmp_path / "cut.json"
    path.write_bytes(data)
    summary = read_trace(path)
    assert summary.truncated
    assert 20 < summary.events < whole.events
    assert summary.kernels is not None
    assert any("ends in the middle" in note for note in summary.notes)
    assert summary.kernels_by_time[0].name == "gemm"


def test_a_damaged_event_is_stepped_over(tmp_path: Path) -> None:
    text = busy_trace().text()
    at = text.index("aten::\\u00e95")
    path = tmp_path / "damaged.json"
    path.write_text(text[:at] + '" oops ' + text[at:])
    summary = read_trace(path)
    assert not summary.truncated
    assert "1 damaged events were left out" in summary.notes
    assert summary.kernels is not None
    assert summary.kernels.count == 40


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a PyTorch trace: the file is empty"),
        (b"step,loss\n1,2\n", "there are no traceEvents"),
        (b'{"schema_version": 1, "status": "completed"}', "there are no traceEvents"),
        (b'{"traceEvents": []}', "its traceEvents are empty"),
        (b'{"traceEvents": [', "it ends before the first event"),
        (b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "a", "ts": 1, "dur": 2}]}', "1 events, but no operator"),
        (b"\x1f\x8b\x08garbage", "the file is empty"),
        (bytes(range(256)), "there are no traceEvents"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.json: No such file"):
        read_trace(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="cannot read"):
        read_trace(tmp_path)


def test_events_without_times_are_left_out(tmp_path: Path) -> None:
    trace = busy_trace()
    trace.events.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": "soon", "args": None})
    trace.events.append({"ph": "X", "cat": "cpu_op", "name": None})
    trace.events.append({"ph": "X", "cat": "cpu_op", "name": "a", "ts": float("nan"), "dur": 1})
    trace.events.append("what")  # type: ignore[arg-type]
    summary = read(tmp_path, trace)
    assert any(note.startswith("3 events without a time") for note in summary.notes)
    assert summary.kernels is not None
    assert summary.kernels.count == 40


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    trace = Trace()
    trace.operator("aten::\x1b[2Jmm" + "x" * 300, 0, 10)
    text = render_trace(read(tmp_path, trace), width=70)
    assert "\x1b" not in text
    assert all(len(line) <= 70 for line in text.splitlines() if not line.startswith("file"))


def test_intervals_agree_with_counting_moments() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        sets, bits = [], []
        for _ in range(2):
            starts = generator.integers(0, 50, 8).astype(float)
            ends = starts + generator.integers(0, 9, 8)
            sets.append(Intervals.covering(starts, ends))
            bits.append(np.array([((starts <= at) & (at < ends)).any() for at in range(60)]))
        first, second = sets
        assert (first | second).total == (bits[0] | bits[1]).sum()
        assert (first - second).total == (bits[0] & ~bits[1]).sum()
        assert first.within(10, 40).total == bits[0][10:40].sum()
        assert first.gaps(10, 40).total == (~bits[0][10:40]).sum()
        moments = np.array([0.0, 13.0, 33.0, 60.0])
        assert first.time_before(moments).tolist() == [bits[0][: int(at)].sum() for at in moments]


class SlowRows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.full((32,), float(index))


def test_a_real_trace_of_the_cpu(tmp_path: Path) -> None:
    model = nn.Linear(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "real.json.gz"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        profile_memory=True,
    ) as profiler:
        for batch in DataLoader(SlowRows(), 4):
            with torch.profiler.record_function("my forward"):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            profiler.step()
    summary = read_trace(path)
    assert [step.step for step in summary.steps] == [1, 2, 3]
    assert not summary.truncated
    for step in summary.steps:
        assert 0.04 <= step.data_loading_s <= step.wall_s
    assert summary.host.data_loading_s == pytest.approx(sum(step.data_loading_s for step in summary.steps))
    names = {item.name: item for item in summary.ranges}
    assert names["my forward"].count == 3
    assert any(item.name.startswith("aten::") for item in summary.operators_by_cpu)
    assert summary.operators_by_memory[0].allocated_bytes
    assert summary.device is None
    assert summary.host.operators_s < summary.wall_s
    assert "in the data loader" in render_trace(summary)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = busy_trace().write(tmp_path / "trace.json")
    code = (
        "import sys\nfrom frameworm.observe.trace.read import read_trace\n"
        f"from frameworm.report.run.trace_text import render_trace\nprint(render_trace(read_trace({str(path)!r})))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "device 0 (NVIDIA H200)" in done.stdout


def test_kernels_are_told_apart_by_what_launched_them(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    for start, operator, kernel in (
        (0, "aten::addmm", "void some_kernel"),
        (20, "aten::_flash_attention_forward", "void other_kernel"),
        (40, "aten::gelu", "void gemm_like_name"),  # its operator knows better
        (60, "frameworm::linear", "nvjet_tst"),
    ):
        trace.operator(operator, start, start + 5)
        trace.launch(kernel, start + 1, start + 5, start + 15)
    trace.launch("sm90_xmma_gemm_bf16", 81, 85, 95, call="cudaGraphLaunch")  # of a graph: only its name tells
    (device,) = read_trace(trace.write(tmp_path / "t.json")).devices
    assert device.kernels_s == pytest.approx({"matrix_products": 30e-6, "attention": 10e-6, "other_kernels": 10e-6})
    assert sum(device.kernels_s.values()) == pytest.approx(device.compute_s)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix_products"),
        ("aten::_scaled_mm", "matrix_products"),
        ("aten::baddbmm_", "matrix_products"),
        ("aten::cudnn_convolution", "matrix_products"),
        ("aten::convolution_backward", "matrix_products"),
        ("aten::_cudnn_rnn_backward", "matrix_products"),
        ("triton_tem_fused_addmm_0", "matrix_products"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "attention"),
        ("flash_attn::_flash_attn_varlen_forward", "attention"),
        ("torch_attn::_varlen_attn", "attention"),
        ("aten::add", "other_kernels"),
        ("aten::convert_element_type", "other_kernels"),
        ("aten::native_layer_norm", "other_kernels"),
        ("aten::_foreach_addcmul_", "other_kernels"),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    assert kind_of_operator(name) == kind
