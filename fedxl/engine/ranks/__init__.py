"""Several processes, one a device, as one engine: nothing outside of this package imports torch.distributed."""
