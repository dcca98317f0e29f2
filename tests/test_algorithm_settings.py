"""Settings of the objective: contradictions refused with their reason, defaults that belong to a named method."""

import pytest
from pydantic import ValidationError

from qerl.config import AlgoConfig, Config, CorrectionConfig

MODES = ["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"algo": {"beta": 0.1, "skip_zero_advantage": True}}, "still has a KL gradient"),
        ({"algo": {"kl_estimator": "k1"}}, "no effect while beta is 0"),
        ({"algo": {"advantage": "rloo", "scale_rewards": "group"}}, "grpo times a constant"),
        ({"algo": {"loss_type": "gspo", "importance_sampling_level": "token"}}, "sequence-level"),
        ({"algo": {"loss_type": "cispo", "importance_sampling_level": "sequence"}}, "own ratio"),
        ({"algo": {"loss_type": "cispo", "delta": 3.0}}, "clipped surrogate"),
        ({"algo": {"delta": 1.2}}, "above 1 \\+ epsilon_high = 1.28"),
        ({"algo": {"overlong_buffer": 8}}, "no effect while overlong_penalty is 0"),
        ({"algo": {"overlong_penalty": 1, "overlong_buffer": 513}}, "longer than"),
        ({"algo": {"num_minibatches": 3}}, "must divide prompts_per_step=8"),
        ({"correction": {"mode": "off", "clip_min": 0.5}}, "no effect with correction.mode=off"),
        ({"correction": {"clip_min": 1.0, "clip_max": 1.0}}, "must be below"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(sections, reason):
    with pytest.raises(ValidationError, match=reason):
        Config.model_validate({"model": "tiny"} | sections)


def test_named_methods_bring_their_settings():
    assert AlgoConfig(advantage="rloo").scale_rewards == "none"
    assert AlgoConfig(advantage="rloo", scale_rewards="batch").scale_rewards == "batch"
    assert AlgoConfig(loss_type="gspo").importance_sampling_level == "sequence"
    assert AlgoConfig().importance_sampling_level == "token"


def test_a_dumped_config_is_read_back_as_it_was():
    """What RUN/config.json holds must not contradict itself."""
    for algo in ({"loss_type": "gspo"}, {"advantage": "rloo"}, {"beta": 0.1}):
        config = Config.model_validate({"model": "tiny", "algo": algo})
        assert Config.model_validate(config.model_dump(mode="json")) == config


def test_zero_advantages_are_skipped_exactly_where_that_is_exact():
    assert AlgoConfig().skips_zero_advantage
    assert not AlgoConfig(beta=0.01).skips_zero_advantage
    assert not AlgoConfig(skip_zero_advantage=False).skips_zero_advantage


def test_corrections_of_whole_sequences():
    levels = {mode: CorrectionConfig(mode=mode).is_sequence_level for mode in MODES}
    assert [mode for mode, is_sequence in levels.items() if is_sequence] == MODES[3:]
