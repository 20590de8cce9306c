"""Step 2, chardata.py: give each rank its own rows of every epoch."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# The modules are two folders up. If they are beside this script, this line changes nothing.
sys.path.append(os.path.join(os.path.dirname(__file__), "..", ".."))
import chardata
import ddp_setup


def main(world):
    torch.manual_seed(0)
    device = world.device
    x = torch.randn(3000, 20)
    y = 2 * (x[:, 0] > x[:, 1]) + (x[:, 2] * x[:, 3] > 0)
    train, test = TensorDataset(x[:2500], y[:2500]), TensorDataset(x[2500:], y[2500:])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    replica = ddp_setup.replicate(model, world)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=3)
    sampler = chardata.RankSampler(len(train), world.rank, world.size, pad=True)
    for epoch in range(3):
        model.train()
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(train, batch_size=96 // world.size, sampler=sampler):
            inputs, targets = inputs.to(device), targets.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(replica(inputs), targets)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        scheduler.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, targets in DataLoader(test, batch_size=96):
                inputs, targets = inputs.to(device), targets.to(device)
                correct += (model(inputs).argmax(1) == targets).sum().item()
        if world.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct / len(test):.4f}")
    if world.rank == 0:
        torch.save(model.state_dict(), "model.pt")


with ddp_setup.process_group() as world:
    main(world)
