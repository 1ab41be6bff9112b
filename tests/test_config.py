"""The engine's configuration: messages that say what to change."""

import numpy as np
import pytest

from jaxspec import EngineConfig, TreeShape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_running_requests": 2.5}, "max_running_requests must be a whole number, got 2.5"),
        ({"num_pages": True}, "num_pages must be a whole number, got True"),
        ({"page_size": None}, "page_size must be a whole number, got None"),
        ({"adaptive": "no"}, "adaptive must be True or False, got 'no'"),
        ({"mem_fraction": "0.5"}, "mem_fraction must be a number, got '0.5'"),
        ({"matmul": 1}, "matmul must be a string, got 1"),
        ({"request_trees": "plain"}, "request_trees must be a list of draft trees"),
        ({"request_trees": [TreeShape(), "5/4"]}, "request_trees: a draft tree is num_steps/topk/num_draft_tokens"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"mem_fraction": 1.5}, "mem_fraction must be in"),
        ({"row_cost": 0.1, "accept_threshold_acc": 0.5}, "row_cost has no effect with acceptance thresholds"),
        ({"row_cost": 1.0}, "row_cost must be at least 0 and below 1, got 1.0"),
        ({"paeg_size": 16}, "paeg_size"),
    ],
)
def test_engine_config_refuses_nonsense_and_unknown_options(given, message):
    with pytest.raises(TypeError if "paeg_size" in given else ValueError, match=message):
        EngineConfig(**given)


def test_trees_of_requests_may_be_written_in_any_way():
    config = EngineConfig(adaptive=True, request_trees=["plain", (3, 1, 4)], adaptive_trees=("2/1/3",), num_pages=np.int64(4))
    assert config.request_trees == (TreeShape(num_steps=0), TreeShape(3, 1, 4))
    assert config.adaptive_trees == (TreeShape(2, 1, 3),)
