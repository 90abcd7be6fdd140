"""Code of somebody who uses the package; `tests/test_wheel.py` type-checks it against the installed wheel."""

from pathlib import Path

from hf_dcsgd import DCSGDTrainer, PrivacyPlan, PrivateRun


def planned() -> float:
    plan = PrivacyPlan.create(
        dataset_size=1000, expected_batch_size=100, steps=10, num_parameters=3, target_epsilon=4.0
    )
    return plan.epsilon()


def spent(trainer: DCSGDTrainer) -> float:
    return trainer.epsilon()


def rate(plan: PrivacyPlan) -> float:
    return plan.sampling_rate


def page(run: PrivateRun) -> Path | None:
    return run.report
