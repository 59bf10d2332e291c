"""REINFORCE with a baseline on a cart-pole written in plain Python; no DataLoader anywhere."""

import argparse
import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class CartPole:
    """The equations of gym's CartPole-v1."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.state = [self.random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(theta), math.sin(theta)
        temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        self.state = [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc]
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180
        return self.state, 1.0, done


class Policy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.affine1 = nn.Linear(4, hidden)
        self.action_head = nn.Linear(hidden, 2)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--max-episode-steps", type=int, default=60)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(543)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = CartPole(543)
    policy = Policy(args.hidden).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3, fused=True)
    eps = 1e-6
    recent = deque(maxlen=20)
    for episode in range(1, args.episodes + 1):
        state, log_probs, values, rewards, actions = env.reset(), [], [], [], []
        for _ in range(args.max_episode_steps):
            probs, value = policy(torch.tensor(state, dtype=torch.float32, device=device))
            action = torch.multinomial(probs.detach(), 1)  # what Categorical.sample draws
            log_probs.append(probs)
            actions.append(action)
            values.append(value)
            state, reward, done = env.step(action.item())
            rewards.append(reward)
            if done:
                break
        returns, R = deque(), 0.0
        for r in reversed(rewards):
            R = r + args.gamma * R
            returns.appendleft(R)
        returns = torch.tensor(list(returns), device=device)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        # one pass over the whole episode instead of one operator chain per step
        log_prob = torch.stack(log_probs).gather(1, torch.stack(actions)).squeeze(1).log()
        value = torch.cat(values)
        optimizer.zero_grad()
        loss = -(log_prob * (returns - value.detach())).sum() + F.smooth_l1_loss(value, returns, reduction="sum")
        loss.backward()
        optimizer.step()
        recent.append(sum(rewards))
        if episode % 20 == 0:
            print(
                f"Episode {episode}\tLast reward: {sum(rewards):.0f}\tAverage reward: {sum(recent) / len(recent):.2f}"
            )
    torch.save(policy.state_dict(), "policy.pt")
    print(f"final loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
