import numpy as np

import horo_lite as hvd


class Weight:
    def __init__(self, name, w):
        self.name, self.w, self.dw = name, w, None


class Trainer:
    def __init__(self, weights, lr):
        self.weights, self.lr = weights, lr

    def apply(self):
        for weight in self.weights:
            weight.w -= self.lr * weight.dw


# adapter: begin
class Adapter(hvd.Adapter):
    steps = ("apply",)  # the methods of an optimizer that apply gradients

    def matches(self, obj):
        return isinstance(obj, (Trainer, Weight))

    def parameters(self, owner):  # of a Trainer; a Weight has none
        return [(weight.name, weight) for weight in getattr(owner, "weights", ())]

    def gradient(self, weight):  # its own memory: NumPy, DLPack or the buffer protocol
        return weight.dw

    def set_gradient(self, weight, array):
        weight.dw = array

    def value(self, weight):
        return weight.w

    def set_value(self, weight, array):
        weight.w = array


hvd.register_adapter(Adapter())
# adapter: end


def backward(weight, inputs, targets):
    weight.dw = 2 / len(inputs) * inputs.T @ (inputs @ weight.w - targets)


def clip(weight, largest):
    weight.dw *= min(1, largest / np.linalg.norm(weight.dw))


# train: begin
def train(weight, batches):
    hvd.broadcast_parameters([("w", weight)])
    trainer = hvd.DistributedOptimizer(Trainer([weight], lr=0.1))
    for inputs, targets in batches:
        backward(weight, inputs, targets)
        trainer.synchronize(weight=len(inputs))  # from here on, averages
        clip(weight, largest=1.0)
        with trainer.skip_synchronize():
            trainer.apply()


# train: end
