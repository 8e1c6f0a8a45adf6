"""A small GPT-2 with random weights, trained by the Trainer of Hugging Face on generated text.

python train_trainer.py [--steps 100000] [options of TrainingArguments]
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORDS, LENGTH = 1000, 64


class Lines(Dataset):  # type: ignore[type-arg]
    """Random lines of tokens."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=5e-4,
            logging_steps=500,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=Lines()).train()


if __name__ == "__main__":
    main()
