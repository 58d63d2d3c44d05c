"""What differential privacy costs on the demo's data, and what an attack still learns."""
