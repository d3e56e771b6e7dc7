"""The ImplicitArray style of defining a type: fields, `materialize()`, and handlers for primitives.

A thin layer over the core: an `ImplicitArray` is a [`quaxlike.ArrayValue`][], `implicit` is
[`quaxlike.quaxify`][] and `register` is [`quaxlike.register`][], so types of both styles work together.
After the style of eformer's `jaximus` and of qax.
"""

from .array import ImplicitArray as ImplicitArray
from .array import OriginArray as OriginArray
from .array import UninitializedAval as UninitializedAval
from .array import aux_field as aux_field
from .array import materialize_nested as materialize_nested
from .handlers import default_handler as default_handler
from .handlers import implicit as implicit
from .handlers import materialize_handler as materialize_handler
from .handlers import register as register
from .handlers import use_implicit as use_implicit
from .ste import ste as ste
from .trees import combine_leaf_predicate as combine_leaf_predicate
from .trees import flatten_one_implicit_layer as flatten_one_implicit_layer
from .trees import implicit_depth as implicit_depth
from .trees import is_array as is_array
from .trees import leaf_predicate as leaf_predicate
from .trees import tree_flatten_with_implicit as tree_flatten_with_implicit
from .trees import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from .trees import tree_leaves_with_implicit as tree_leaves_with_implicit
from .trees import tree_map_with_implicit as tree_map_with_implicit
from .trees import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from .trees import tree_structure_with_implicit as tree_structure_with_implicit
