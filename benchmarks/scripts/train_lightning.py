"""ResNet-18 as a LightningModule, with a LightningDataModule.

python train_lightning.py [--epochs 1000]
"""

import argparse

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18


class Classifier(lightning.LightningModule):
    """A ResNet-18 and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.network = resnet18(num_classes=10)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of images (N, 3, H, W) and labels (N,)."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Images(lightning.LightningDataModule):
    """Random images."""

    def train_dataloader(self) -> DataLoader:  # type: ignore[type-arg]
        """Return the loader to train with."""
        data = TensorDataset(torch.randn(1024, 3, 64, 64), torch.arange(1024) % 10)
        return DataLoader(data, batch_size=32, shuffle=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    options = parser.parse_args()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), datamodule=Images())


if __name__ == "__main__":
    main()
