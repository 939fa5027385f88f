import numpy as np

import horo_lite as hvd


# begin
class PowerSGD(hvd.Compressor):
    """Sends two thin factors of each matrix (Vogels et al., 2019), with error feedback."""

    def __init__(self, rank=4):
        super().__init__(f"PowerSGD of rank {rank}")
        self.rank, self.left_over, self.factors = rank, {}, {}

    def exchange(self, names, gradients, ranks):
        matrices, as_they_are = {}, []
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.ndim < 2 or min(len(gradient), gradient[0].size) <= self.rank:
                as_they_are.append(gradient)
                continue
            gradient += self.left_over.get(name, 0)
            matrices[name] = gradient.reshape(len(gradient), -1)
            if name not in self.factors:  # the same on every rank
                random = np.random.default_rng(len(self.factors))
                shape = matrices[name].shape[1], self.rank
                self.factors[name] = random.standard_normal(shape, np.float32)
        left = {name: m @ self.factors[name] for name, m in matrices.items()}
        ranks.average([*left.values(), *as_they_are])
        left = {name: np.linalg.qr(x)[0] for name, x in left.items()}
        right = {name: m.T @ left[name] for name, m in matrices.items()}
        ranks.average(list(right.values()))
        self.factors |= right
        for name, gradient in zip(names, gradients, strict=True):
            if name in matrices:
                result = (left[name] @ right[name].T).reshape(gradient.shape)
                self.left_over[name] = gradient - result
                gradient[...] = result

    def reset(self):  # after an overflow, for example
        self.left_over.clear()
        self.factors.clear()


# end
