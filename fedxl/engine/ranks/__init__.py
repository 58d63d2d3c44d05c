"""Several processes, one per device, as one engine: nothing outside of this package imports torch.distributed."""
