import numpy as np

import horo_lite as hvd


# begin
class TopK(hvd.Compressor):
    """Sends the largest elements of each gradient, and the others in later steps."""

    def __init__(self, share=0.01):
        super().__init__(f"top {share:%}")
        self.share, self.left_over = share, {}

    def exchange(self, names, gradients, ranks):
        places, values, first = [], [], 0
        share = ranks.share  # with weights, the ranks add these up
        for name, gradient in zip(names, gradients, strict=True):
            gradient += self.left_over.get(name, 0)
            self.left_over[name] = rest = gradient.copy()
            k = max(1, round(self.share * rest.size))
            largest = np.argpartition(abs(rest.reshape(-1)), -k)[-k:]
            places.append(largest + first)
            values.append(rest.reshape(-1)[largest] * share)
            rest.reshape(-1)[largest] = 0
            first += rest.size
        everyones_places = ranks.allgather(np.concatenate(places))
        everyones_values = ranks.allgather(np.concatenate(values))
        total = np.zeros(first, np.float32)
        for where, what in zip(everyones_places, everyones_values, strict=True):
            total[where] += what
        for gradient in gradients:
            gradient[...] = total[: gradient.size].reshape(gradient.shape)
            total = total[gradient.size :]

    def reset(self):  # after an overflow, for example
        self.left_over.clear()


# end
