import numpy as np

import horo_lite as hvd


class Weight:
    def __init__(self, name, data):
        self.name, self.data, self.grad = name, data, None


class Momentum:
    def __init__(self, weights, lr):
        self.weights, self.lr = weights, lr
        self.velocities = [np.zeros_like(weight.data) for weight in weights]

    def step(self):
        for weight, velocity in zip(self.weights, self.velocities, strict=True):
            velocity *= 0.9
            velocity += weight.grad
            weight.data -= self.lr * velocity


def backward(weight, inputs, targets):
    weight.grad = 2 / len(inputs) * inputs.T @ (inputs @ weight.data - targets)


# train: begin
def train(weights, batches):
    hvd.broadcast_parameters(weights)
    optimizer = hvd.DistributedOptimizer(
        lambda some: Momentum(some, lr=0.1), parameters=weights, shard_state=True
    )
    for inputs, targets in batches:
        for weight in weights:
            backward(weight, inputs, targets)
        optimizer.step()  # each rank updates its weights, and receives the others'
    state = optimizer.state_dict()  # on every rank; then rank 0 saves it
    assert list(state) == ["parameters[0]"]


# train: end
