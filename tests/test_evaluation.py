from __future__ import annotations

import pytest

from diloco_jax import baseline, evaluation
from diloco_jax.config import Config, ConfigError, DataConfig, IslandConfig, RunConfig


@pytest.mark.parametrize(
    "judge",
    [
        lambda config: evaluation.whole_validation(config, None, None),
        baseline.run,
    ],
    ids=["evaluation", "baseline"],
)
def test_a_loss_on_other_text_than_the_runs_is_no_result(judge, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("other text " * 100)
    data = DataConfig(paths=(str(tmp_path),), digest="0" * 16)
    config = Config(
        run=RunConfig(data=data, sequence_length=16),
        islands={"a": IslandConfig(batch_size=1)},
    )
    with pytest.raises(ConfigError, match=r"data.digest = 0000.*--data.paths"):
        judge(config)
