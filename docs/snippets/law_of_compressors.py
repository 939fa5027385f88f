import numpy as np

import horo_lite as hvd


# begin
def check(compressor, n_steps=20):
    """Check that nothing is lost: what was received and what is left over is what was given."""
    world = hvd.init()
    rng = np.random.default_rng(world.rank)
    given, received = np.zeros((2, 40, 30))
    for _ in range(n_steps):
        gradient = rng.standard_normal((40, 30)).astype(np.float32)
        given += hvd.allreduce(gradient)
        received += hvd.average_gradients(gradient, compression=compressor, name="law")
    (left_over,) = compressor.left_over.values()
    np.testing.assert_allclose(received + hvd.allreduce(left_over), given, atol=1e-3)
    assert len({x.tobytes() for x in hvd.allgather_object(received)}) == 1
    assert not np.allclose(received, given, atol=1e-3)  # something is left over


# end
