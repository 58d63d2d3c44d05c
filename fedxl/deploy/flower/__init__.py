"""Everything of Flower that fedxl uses. No other module of fedxl imports `flwr`.

Much of it is not part of Flower's public interface and may change with any version: this is the list to check. Each
kind of process loads only its own file: SuperLink's command imports 200 modules, the gateway needs protobuf alone.
"""
