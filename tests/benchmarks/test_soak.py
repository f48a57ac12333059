"""When a soak says that the bridge has grown."""

from dataclasses import replace

from benchmarks.soak import Sample, verdict

STEADY = [Sample(n / 6, 50_000.0, 0.5, 0.4 + n % 3, 90.0 + n % 2, 9, 30) for n in range(60)]


def test_noise_is_not_growth() -> None:
    found = verdict(70_000.0, STEADY)
    assert not found.grew
    assert found.rows_s == 50_000.0
    assert found.minutes == 59 / 6


def test_memory_threads_descriptors_and_arrears_are_each_growth() -> None:
    leaks = (
        [replace(s, resident_mib=s.resident_mib + s.minutes) for s in STEADY],
        [replace(s, threads=s.threads + int(s.minutes / 4)) for s in STEADY],
        [replace(s, descriptors=s.descriptors + int(s.minutes / 4)) for s in STEADY],
        [replace(s, lag_mb=s.lag_mb + 20 * s.minutes) for s in STEADY],
    )
    assert [verdict(70_000.0, leak).grew for leak in leaks] == [True] * 4


def test_memory_taken_while_warming_up_is_not_growth() -> None:
    warmed = [replace(s, resident_mib=70.0) if s.minutes < 1.9 else s for s in STEADY]
    assert not verdict(70_000.0, warmed).grew
