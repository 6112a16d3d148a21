"""State: what a training state is made of, and how it is put back. The face of the pages beside it.

    capture(state) -> Captured: tensors by name, aliases, values          objects.py  capture.py
    Capture().take(state) -> Captured, again and again                    cached.py
    match(state, Stored) -> Match.apply(fetch)                            reading.py  binding.py  match.py
    what classes and modules of the user's add                instances.py  flattened.py  wrappers.py  own_loading.py
    what PEFT keeps beside the weights of its models                      adapters.py
    tensor <-> bytes                                                      tensors.py

Only these pages know what torch's objects are made of. Capture reads: it steps nothing, draws no random number and
copies no tensor. Match compares, and lists all differences at once. Only `Match.apply` writes.

**Entries.** The state is the user's own dict; it is read anew each time. Its values, at any depth of dicts, lists and
tuples: modules, optimizers, anything with state_dict and load_state_dict (schedulers, scalers, samplers, loaders),
tensors, numpy arrays, generators (torch.Generator, numpy Generator and RandomState, random.Random) and plain data
(format/values.py). What an object's state_dict returns is data: tensors, arrays and plain data. Deques, defaultdicts,
namedtuples and dataclasses are containers too: what they hold has the name of its place or field. An optimizer or
scheduler in a wrapper that only delegates to it (Accelerate, Lightning, Fabric, or one that holds nothing but the
optimizer) is stored as the bare one.

**Names.** Path from the key of the state, joined with dots; keys of dicts are escaped, names inside a module keep their
dots and lose `module.` (DistributedDataParallel), `_orig_mod.` (torch.compile), `_checkpoint_wrapped_module.`
(activation checkpointing), `_forward_module.` and `_original_module.` (Fabric) wherever these stand.

    model.h.0.weight                        a parameter or persistent buffer, as in the module's state_dict()
    optimizer.state.h.0.weight.exp_avg      state of the parameter h.0.weight of the one module that owns them all
    optimizer.state.model.h.0.weight.step   ... where parameters of several modules are optimized together
    optimizer.state.3.exp_avg               ... of a parameter that no module of the state owns: its place, counted
                                            through all groups
    optimizer.param_groups.0.lr             a hyperparameter
    model.head.weight.int_data              an inner tensor of a tensor subclass, by the name of its attribute
    rng.torch, rng.cuda.0, rng.python       random number generators, always captured

Memory that has two names is stored once, the further names are aliases: same device, address, dtype, shape, strides.

**Memory order.** Strides belong to a tensor. Whatever is made anew has its dimensions in the stored order in memory;
optimizer state that had its parameter's order takes that of the live parameter. What is written in place stays as it
lies. See docs/format.md, section 4.

**Restoring** keeps identity. Tensors and arrays are written in place and must agree in shape and dtype. Dicts, lists,
sets and counters are refilled: entries that the generation lacks are removed, new ones made, a tensor on the device it
was on if there is one. Objects and modules are loaded where they are; one that has nothing stored, or no place, is a
difference. Numbers, strings and other constants are written into the container, or the state, that holds them.
Optimizers come after all other entries, the random number generators last.

*Modules:* names, shapes and dtypes are compared, then their own memory is written. Where state_dict() holds something
else (computed tensors, extra state), a load_state_dict post-hook is registered, or a module loads by itself,
`load_state_dict` is called after that. A module loads by itself if it has its own `_load_from_state_dict` or
load_state_dict pre-hook, or, as an entry of the state, its own `load_state_dict`; those of torch.nn and
torch.distributed, which translate old names, do not count. A tensor of such a module, or of a lazy one, may have
another shape than the stored one: its module is handed the verified tensor and resizes itself, and where it has not,
that is LoadFailed. A pre-hook alone gives no such freedom, because most only rename. Another dtype, or a missing or
unexpected name, is a difference there too.

*Instances:* the class of the live object is used where its qualified name agrees, else the imported class of that
name; where there is none, that is a difference. A live dataclass is refilled in place unless it is frozen; Enum members
are looked up; namedtuples and the rest are made anew. Values of `functools.cached_property` are not stored, and are
dropped from an instance that is refilled. A defaultdict that is refilled keeps its live factory.

*Tensor subclasses* with `__tensor_flatten__`: the inner tensors are written in place. Only where there is no live
tensor, as in the state of a new optimizer, the imported class is asked to make one (`__tensor_unflatten__`). It is
asked once before anything is written, with tensors without content: where it raises, that is a difference.

When a user's `load_state_dict`, or other code outside of lastgood, raises after the writing has begun, the restore ends
at once with LoadFailed, a HalfLoaded, from that error.

*Optimizers:* `state` and `param_groups` are read and written directly, without casts, by the names of the parameters;
hooks on their state_dict are not run. A class with its own state_dict or load_state_dict is an object like any other.
LBFGS, whose state is one vector over all parameters, also needs these in the same order.

**rename** {stored: live} speaks of top-level entries and of names in modules, exactly or, if both end in ".", by
prefix (the longest one counts). An optimizer's state follows its parameters: rename them by their name with the key of
their module, `model.encoder.`. Entries of nested dicts keep their names.

**include, exclude** are patterns (fnmatch) on names, and each speaks of all below the names that it matches. What is
not wanted is not captured; at a match it is not demanded and stays as it is. In a list it leaves its place empty; an
object's load_state_dict does not see it.

**Tags** that these pages add to those of format/values.py:

    {"!tensor": name} or {"!tensor": [name, device, is a Parameter, requires_grad]}; short for a plain one on the CPU
    {"!ndarray": [name, dtype]}             a dtype that torch lacks is stored as uint8 with one more dimension
    {"!permuted": [order, tree]}            one of the two above whose memory is not row-major: its dimensions from the
                                            outermost to the innermost in memory
    {"!torch.dtype": "float32"}   {"!torch.device": "cuda:0"}   {"!torch.Size": [2, 3]}
    {"!Enum": {"class": "module:Class", "parts": {"member": name or number}}}
    {"!namedtuple": {"class", "parts"}}   {"!dataclass": {"class", "parts"}}   {"!subclass": {"class", "parts"}}
    {"!np.ma": {"class", "parts": {"data", "mask", "fill_value", "hard"}}}                 a masked array
    {"!flattened": {"class", "parts", "context", "size", "stride", "parameter", "requires_grad"}}  a tensor subclass
    {"!module": {name: tree}}               its tensors are those whose names begin with its path; here, what else its
                                            state_dict() holds
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
