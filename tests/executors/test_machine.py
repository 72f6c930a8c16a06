"""The machine in words, and the cores and the memory that this process may use."""

from __future__ import annotations

from pathlib import Path

from lockstep.executors.machine import (
    available_cores,
    available_memory_bytes,
    machine_memory_bytes,
    machine_name,
    processor_name,
)


def test_cores_are_cut_by_the_cgroups_quota(tmp_path: Path) -> None:
    unlimited = available_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(tmp_path) == unlimited
    for quota, cores in (("100000", 1), ("50000", 1), ("150000", 1), ("6400000", unlimited)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert available_cores(tmp_path) == cores
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", unlimited), ("100000", 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert available_cores(tmp_path) == cores


def test_a_processor_is_called_as_the_machine_calls_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\n")
    assert processor_name(cpuinfo) == "Some CPU @ 2 GHz"
    assert machine_name(cpuinfo).startswith("Some CPU @ 2 GHz, ")
    assert machine_name(cpuinfo).endswith(" logical cores")


def test_machine_without_a_processor_name_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\n")
    assert processor_name(cpuinfo) is None
    assert machine_name(cpuinfo).startswith("unknown processor, ")


def test_a_machine_has_no_more_than_its_cgroup(tmp_path: Path) -> None:
    whole = machine_memory_bytes(tmp_path)
    assert whole >= available_memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine_memory_bytes(tmp_path) == 5000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory_bytes(tmp_path) == whole


def test_available_memory_is_cut_by_the_cgroup(tmp_path: Path) -> None:
    whole = available_memory_bytes(tmp_path)
    assert whole > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_memory_bytes(tmp_path) == 3000
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 1500\nactive_file 300\n")
    assert available_memory_bytes(tmp_path) == 4500, "what was read and may be forgotten is free"
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 3000
