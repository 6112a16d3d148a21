"""State: what a training state consists of, how it is named and stored, and how it is restored. The rules of this room.

    capture(state) -> Captured: tensors by name, aliases, values          capture.py  walk.py  collected.py  objects.py
    Capture().take(state) -> Captured, save after save                    capture_cache.py
    match(state, Stored) -> Match.apply(content, settings)                decode.py  binder.py  match.py
    classes and modules of the user                           instances.py  subclasses.py  wrappers.py  own_loading.py
    what PEFT keeps beside the weights of its models                      adapters.py
    tensor <-> bytes                                                      tensors.py

Only these modules know what torch's objects consist of. A capture reads: it makes no optimizer step, draws no random
number and copies no tensor (only an array that torch cannot view). A match compares, and lists all differences at once.
Only `Match.apply` writes.

**Entries.** The state is the user's own dict; every capture reads it again. Its values may be nested in dicts, lists
and tuples to any depth: modules, optimizers, any object with state_dict and load_state_dict (schedulers, scalers,
samplers, loaders), tensors, numpy arrays, generators (torch.Generator, numpy Generator and RandomState, random.Random)
and plain data (format/values.py). The result of an object's state_dict is data: tensors, arrays and plain data. Deques,
defaultdicts, namedtuples and dataclasses are containers too: what they hold is named by its index, key or field. An
optimizer or scheduler in a wrapper that only delegates to it (Accelerate, Lightning, Fabric, or one that holds nothing
but the optimizer) is stored as if it had no wrapper.

**Names.** A name is the path from the key of the state, joined with dots. Keys of dicts are escaped. Names inside a
module keep their dots and lose `module.` (DistributedDataParallel), `_orig_mod.` (torch.compile),
`_checkpoint_wrapped_module.` (activation checkpointing), `_forward_module.` and `_original_module.` (Fabric) wherever
these occur.

    model.h.0.weight                        a parameter or persistent buffer, as in the module's state_dict()
    optimizer.state.h.0.weight.exp_avg      state of the parameter h.0.weight, where one module owns all parameters
    optimizer.state.model.h.0.weight.step   ... where parameters of several modules are optimized together
    optimizer.state.3.exp_avg               ... of a parameter that no module of the state owns: its index, counted
                                            through all groups
    optimizer.param_groups.0.lr             a hyperparameter
    model.head.weight.int_data              an inner tensor of a tensor subclass, by the name of its attribute
    rng.torch, rng.cuda.0, rng.python       random number generators; captured unless they are excluded

Memory with several names is stored once, and the further names are aliases. Two tensors are the same memory if device,
address, dtype, shape, strides and the conj and neg flags are equal; an empty tensor shares no memory.

**Memory order.** Strides belong to a tensor. A tensor that a restore creates has its dimensions in the stored memory
order; optimizer state that had the memory order of its parameter gets that of the live parameter. A tensor that is
written in place keeps its strides. See docs/format.md, section 4.

**Restoring** keeps the identity of live objects. Tensors and arrays are written in place and must agree in shape and
dtype. Dicts, lists, sets and counters are refilled: entries that the generation lacks are removed, and missing ones are
created (a tensor on the device that it was stored from, or on the CPU if this machine lacks it). Objects and modules
are loaded in place; one that has nothing stored, or that exists only in the generation, is a difference. Numbers,
strings and other constants are written into the container, or the state, that holds them. Optimizers are restored after
all other entries, and the random number generators last.

*Modules:* names, shapes and dtypes are compared, then the memory of the module is written. `load_state_dict` is called
after that if state_dict() holds other things (computed tensors, extra state), if a load_state_dict post-hook is
registered, or if a module loads by itself. A module loads by itself if it has its own `_load_from_state_dict` or
load_state_dict pre-hook, or, as an entry of the state, its own `load_state_dict`. Those of torch.nn and
torch.distributed, which translate old names, do not count. A tensor of such a module, or of a lazy one, may differ in
shape from the stored one: its module receives the verified tensor and resizes itself, and if it does not, LoadFailed is
raised. A pre-hook alone does not permit another shape, because most pre-hooks only rename. Another dtype, or a missing
or unexpected name, is a difference for these modules too.

*Instances:* the class of the live object is used if its qualified name agrees, else the imported class of that name; if
there is none, that is a difference. A live dataclass is refilled in place unless it is frozen; Enum members are found
by name; namedtuples and the rest are created. Values of `functools.cached_property` are not stored, and are removed
from an instance that is refilled. A defaultdict that is refilled keeps its live factory.

*Tensor subclasses* with `__tensor_flatten__`: the inner tensors are written in place. Only if there is no live tensor,
as in the state of a new optimizer, `__tensor_unflatten__` of the imported class creates one. It is called once before
anything is written, with tensors without content; if it raises then, that is a difference.

If a user's `load_state_dict`, or other code outside of lastgood, raises after writing has begun, the restore ends at
once with LoadFailed, a HalfLoaded, raised from that error.

*Shared memory:* live tensors that share a part of their memory are compared with the stored ones when all are written.
If one has other bytes then, the stored ones differ in that part, which is LoadFailed. Two names of one live tensor must
be stored as one tensor.

*Optimizers:* `state` and `param_groups` are read and written directly, without casts, by the names of the parameters;
hooks on their state_dict are not run. A class that overrides state_dict or load_state_dict is handled as an object.
LBFGS, whose state is one vector over all parameters, also needs the parameters in the same order.

**rename** {stored: live} applies to top-level entries and to names in modules: to a whole name, or, if both end in ".",
to a prefix (the longest one wins). The state of an optimizer follows its parameters: rename these by their name with
the key of their module, `model.encoder.`. Entries of nested dicts keep their names.

**include, exclude** are patterns (fnmatch) on names; each also matches every name below a name that it matches. What is
not wanted is not captured; a match does not require it and leaves the live value. In a list its place stays
empty; an object's load_state_dict does not receive it.

**Tags** that these modules add to those of format/values.py:

    {"!tensor": name} or {"!tensor": [name, device, is a Parameter, requires_grad]}; short for a plain one on the CPU
    {"!ndarray": [name, dtype]}             a dtype that torch lacks is stored as uint8 with one more dimension
    {"!permuted": [order, tree]}            one of the two above that is not row-major: its dimensions from the
                                            outermost to the innermost in memory
    {"!torch.dtype": "float32"}   {"!torch.device": "cuda:0"}   {"!torch.Size": [2, 3]}
    {"!Enum": {"class": "module:Class", "parts": {"member": name or number}}}
    {"!namedtuple": {"class", "parts"}}   {"!dataclass": {"class", "parts"}}   {"!subclass": {"class", "parts"}}
    {"!np.ma": {"class", "parts": {"data", "mask", "fill_value", "hard"}}}                 a masked array
    {"!flattened": {"class", "parts", "context", "size", "stride", "parameter", "requires_grad"}}  a tensor subclass
    {"!module": {name: tree}}               all of its state_dict() except tensors; its tensors are those whose names
                                            begin with its path
    {"!optimizer": {"class": name, "groups": [{"params": [[name, shape], ...], "options": tree}, ...],
                    "state": {name: tree}, "common": tree}}        names with the key of their module; [name, shape,
                                            order] where the memory of a parameter is not row-major
    {"!object": tree}                       its state_dict()
    {"!scaler": tree}                       a GradScaler, read without waiting for the device; {} if disabled
    {"!torch.Generator": {"device", "state"}}   {"!random.Random": getstate()}
    {"!np.Generator": bit_generator.state}      {"!np.RandomState": get_state(legacy=False)}
"""

from __future__ import annotations

from .capture import Capture, Captured, Origin, capture
from .decode import Stored
from .match import Match, match
from .tensors import as_bytes, dtype_name, from_bytes

__all__ = [
    "Capture",
    "Captured",
    "Match",
    "Origin",
    "Stored",
    "as_bytes",
    "capture",
    "dtype_name",
    "from_bytes",
    "match",
]
