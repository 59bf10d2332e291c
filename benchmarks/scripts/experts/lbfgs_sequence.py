"""Learn sine waves with two LSTM cells and LBFGS, after pytorch/examples/time_sequence_prediction."""

import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.lstm1 = nn.LSTMCell(1, hidden)
        self.lstm2 = nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, input):
        outputs = []
        h_t = torch.zeros(input.size(0), self.hidden, dtype=input.dtype, device=input.device)
        c_t, h_t2, c_t2 = torch.zeros_like(h_t), torch.zeros_like(h_t), torch.zeros_like(h_t)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120, help="steps to run")
    parser.add_argument("--waves", type=int, default=64)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=51)
    opt = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shift = np.random.randint(-4 * 20, 4 * 20, opt.waves).reshape(-1, 1)
    data = np.sin((np.arange(opt.length + 1) + shift) / 1.0 / 4.0)
    waves = torch.from_numpy(data).double().to(device)
    test_input, test_target = waves[:8, :-1], waves[:8, 1:]
    input, target = waves[8:, :-1], waves[8:, 1:]

    seq = Sequence(opt.hidden).double().to(device)
    if device.type == "cuda":
        seq.compile()  # unrolled: hundreds of launches become a few; a CPU gains nothing
    criterion = nn.MSELoss()
    # use LBFGS as optimizer since we can load the whole data to train
    optimizer = optim.LBFGS(seq.parameters(), lr=0.3, max_iter=2)
    losses = []

    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            losses.append(loss.detach())
            loss.backward()
            return loss

        optimizer.step(closure)
        if i % 10 == 0:
            with torch.no_grad():
                loss = criterion(seq(test_input), test_target)
            print("STEP:", i, "train loss:", losses[-1].item(), "test loss:", loss.item())
    torch.save(seq.state_dict(), "sequence.pt")
    print(f"final loss: {losses[-1].item():.8f}")
