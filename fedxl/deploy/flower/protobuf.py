"""Messages of the fleet interface, as protobuf: what sites and SuperLink exchange."""
# mypy: implicit-reexport
# ruff: noqa: F401

from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, Message, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
