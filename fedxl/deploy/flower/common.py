"""Records, messages and the objects in which they travel: for the server and for sites."""

from flwr.app import Array as Array
from flwr.app import ArrayRecord as ArrayRecord
from flwr.app import ConfigRecord as ConfigRecord
from flwr.app import Context as Context
from flwr.app import Error as Error
from flwr.app import Message as Message
from flwr.app import MessageType as MessageType
from flwr.app import RecordDict as RecordDict
from flwr.app.message import make_message as make_message
from flwr.app.message import remove_content_from_message as remove_content_from_message
from flwr.clientapp import ClientApp as ClientApp
from flwr.common.serde import message_to_proto as message_to_proto
from flwr.common.serde import run_from_proto as run_from_proto
from flwr.common.serde_utils import metadata_from_proto as metadata_from_proto
from flwr.serverapp import Grid as Grid
from flwr.serverapp import ServerApp as ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects as get_all_nested_objects
from flwr.supercore.inflatable.inflatable_object import get_object_body as get_object_body
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content as get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_object import get_object_tree as get_object_tree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree as iterate_object_tree
from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute as no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf as make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_push_object_fn_protobuf as make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError as ObjectUnavailableError
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents as inflate_object_from_contents
from flwr.supercore.inflatable.inflatable_utils import pull_objects as pull_objects
from flwr.supercore.inflatable.inflatable_utils import push_objects as push_objects
from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
