"""The list of programs that users' machines need not check is of today's kernels."""

import list_tested_programs
from flashattn_core import _ext, check


def test_it_lists_todays_programs_or_none():
    device, sums = _ext.Device("cuda", 90), set()
    for call in list_tested_programs.calls():
        for variant in list_tested_programs.variants(call, device):
            sums |= {line.split()[-1] for line in _ext.programs(call, variant, device)}
    assert check._tested() in ({}, {"sm_90a, NVRTC 13.0": sums}), "run list_tested_programs.py, or empty tested.json"
