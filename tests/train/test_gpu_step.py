"""A training step of a real head fits on one GPU, by XLA's compiler."""

import json
import os
import subprocess
import sys

from jaxspec.planner.compile import WITHOUT_GPU


def test_a_step_of_llama_8bs_head_fits_in_80_gb(gpu_compiler):
    """4 rows of 2,048 tokens, 7 unroll steps, without storing a level's scores of what it does not see."""
    command = [sys.executable, "-m", "tests.train.gpu_step"]
    done = subprocess.run(command, env=os.environ | WITHOUT_GPU, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["aliased_bytes"] > 8 * found["learnt_parameters"], "parameters and the optimizer's state are changed in place"
    assert found["learnt_parameters"] > 400e6 and found["argument_bytes"] > 19e9
    assert found["argument_bytes"] + found["temporary_bytes"] < 36e9, found
