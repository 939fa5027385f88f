"""The exchange of gradients: buckets, when they leave, and the optimizers that use them."""
