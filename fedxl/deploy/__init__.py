"""The same algorithms over a network: sites that keep their data, a server that averages, Flower in between."""
