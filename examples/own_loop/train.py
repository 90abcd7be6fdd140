"""A private training loop of one's own, without the `Trainer`: it ends in the same report."""

import torch
from transformers import default_data_collator

from hf_dcsgd import PrivacyPlan, PrivateRun


def main(output_dir: str = "outputs/own_loop") -> None:
    points = torch.randn(4000, 8)
    rows = [{"input": x, "labels": y} for x, y in zip(points, (points.sum(1) > 0).long(), strict=True)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plan = PrivacyPlan.create(
        dataset_size=len(rows),
        expected_batch_size=256,
        steps=60,
        num_parameters=sum(p.numel() for p in model.parameters()),
        target_epsilon=4,
    )
    with PrivateRun(model, rows, default_data_collator, plan, output_dir, largest_stack=256) as run:
        for stacks in run.batches():
            run.step(stacks)
            optimizer.step()
            optimizer.zero_grad()
    new = torch.randn(1000, 8)
    accuracy = (model(new).argmax(1) == (new.sum(1) > 0)).float().mean()
    print(f"accuracy on new points: {accuracy:.1%}; report: {run.report}")


if __name__ == "__main__":
    main()
