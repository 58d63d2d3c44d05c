"""What all of Flower's HTTP clients share."""

from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor as RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient as ProtobufClient
from flwr.supercore.protobuf.client import ProtobufClientInterceptor as ProtobufClientInterceptor
