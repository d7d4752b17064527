"""Spans of partitions: how a fragment of a parameter is cut where its updates are deferred."""

import pytest
from stepwell.deepspeed.zero.partition import Fragment, Source, runs_of


@pytest.mark.parametrize("row_len", [0, 1, 7])
@pytest.mark.parametrize("first", [0, 3, 7, 9])
@pytest.mark.parametrize("numel", [0, 2, 4, 11, 35])
def test_runs_are_whole_rows_and_what_is_cut_of_rows(numel, first, row_len):
    runs = runs_of(Fragment(2, 100, numel), Source(first, row_len))
    covered = [at for run in runs for at in range(run.begin, run.begin + run.numel)]
    assert covered == list(range(100, 100 + numel))
    # Which of a parameter's rows are whole in the fragment.
    rows = range(first, first + numel)
    whole = [at for at in rows if row_len and at % row_len == 0 and at + row_len - 1 in rows]
    assert [run.begin - 100 + first for run in runs if run.row_len] == whole[:1]
    assert sum(run.numel for run in runs if run.row_len) == len(whole) * row_len
    assert all(run.group == 2 and run.numel and run.row_len in (0, row_len) for run in runs)
