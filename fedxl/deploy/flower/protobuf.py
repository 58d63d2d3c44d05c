"""Messages of the fleet interface, as protobuf: what sites and SuperLink exchange."""

from flwr.proto.fleet_pb2 import ActivateNodeRequest as ActivateNodeRequest
from flwr.proto.fleet_pb2 import DeactivateNodeRequest as DeactivateNodeRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest as PullMessagesRequest
from flwr.proto.fleet_pb2 import PullMessagesResponse as PullMessagesResponse
from flwr.proto.fleet_pb2 import PushMessagesRequest as PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest as SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
from flwr.proto.message_pb2 import Message as Message
from flwr.proto.message_pb2 import ObjectTree as ObjectTree
from flwr.proto.message_pb2 import PullObjectRequest as PullObjectRequest
from flwr.proto.node_pb2 import Node as Node
