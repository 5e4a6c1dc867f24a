"""Ways to damage a file: bytes, JSON, tensors and the archives that hold them.

Every function takes a source of randomness and returns something else than it was given, most of the time.
"""

import io
import json
import pickletools
import struct
import zipfile
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save

ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 255, 256, *(2**power for power in (15, 31, 40, 62, 63, 64)), 10**400)
ODD_NUMBERS += (0.0, -0.0, 0.5, 1e-320, 1e300, float("nan"), float("inf"), -float("inf"))
ODD_TEXTS = ("", "x", "../../etc/passwd", "\0", "\udcff", "learned:8", "learned:" + "9" * 30, "9" * 5000)
ODD_TEXTS += ("nan", "1.0", "x" * 100_000, "hf-hub:someone/model", "/dev/zero", "stam-agent", "ä", "\u202e")


def damage_bytes(content: bytes, random: Random) -> bytes:
    """Flips, cuts, repeats or overwrites some bytes."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5, 30))):
        place = random.randrange(len(data)) if data else 0
        end = min(len(data), place + random.choice((1, 2, 4, 8, 64, 1000)))
        match random.randrange(7):
            case 0 if data:
                data[place] ^= 1 << random.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place:end]
            case 3:
                data[place:place] = data[place:end]
            case 4:
                data[place:end] = bytes(random.randrange(256) for _ in range(end - place))
            case 5:
                data[place:end] = bytes([random.choice((0, 255))]) * (end - place)
            case _ if len(data) >= 8:  # a length, often: where formats trust what they are told
                where = random.choice((0, place))
                data[where : where + 8] = struct.pack(
                    "<Q", random.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1))
                )
    return bytes(data)


def odd_value(random: Random, depth: int = 0) -> Any:
    """Returns something that no field expects."""
    kind = random.randrange(9)
    if kind <= 2:
        return random.choice(ODD_NUMBERS)
    if kind <= 4:
        return random.choice(ODD_TEXTS)
    if kind == 5:
        return random.choice((None, True, False))
    if kind == 6 or depth > 2:
        return [] if random.random() < 0.5 else {}
    if kind == 7:
        return [odd_value(random, depth + 1) for _ in range(random.choice((1, 2, 3, 50)))]
    return {random.choice(("a", "format", "width", "labels")): odd_value(random, depth + 1)}


def damage_json(value: Any, random: Random) -> str:
    """Changes some entries of a JSON document, or its text."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _damage_entry(value, random)
    text = json.dumps(value)
    match random.randrange(12):
        case 0:
            depth = random.choice((10, 500, 5_000, 200_000))
            odd = random.choice(("[", '{"a":')) * depth
            place = random.randrange(len(text)) if text else 0
            return text[:place] + odd + text[place:]
        case 1:
            return damage_bytes(text.encode(), random).decode("latin-1")
    return text


def _damage_entry(value: Any, random: Random) -> Any:
    holders = list(_holders(value))
    if not holders or random.random() < 0.02:
        return odd_value(random)
    holder, key = random.choice(holders)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[random.choice((f"{key}x", *map(str, ODD_TEXTS[:6])))] = holder[key]
        case 1:
            holder.insert(random.randrange(len(holder)), odd_value(random))
        case 2:
            other, name = random.choice(holders)
            holder[key] = json.loads(json.dumps(other[name]))  # something that is right elsewhere
        case 3:
            holder[key] = [holder[key]]
        case 4 if isinstance(holder[key], list):
            holder[key] = holder[key][: random.randrange(len(holder[key]) + 1)]
        case 5 if isinstance(holder[key], (int, float)) and abs(holder[key]) < 10**15:
            holder[key] = (
                -holder[key]
                if random.random() < 0.3
                else holder[key] * random.choice((2, 10**6, 10**18, 0.5))
            )
        case _:
            holder[key] = odd_value(random)
    return value


def _holders(value: Any) -> Any:
    """Yields every (dictionary, key) and (list, index) of a document."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in list(entries):
        yield value, key
        yield from _holders(item)


def damage_tensors(state: dict[Any, Any], random: Random) -> dict[Any, Any]:
    """Drops, renames, reshapes or replaces some tensors of a state dict."""
    state = dict(state)
    for _ in range(random.choice((1, 1, 2, 4))):
        if not state:
            break
        name = random.choice(list(state))
        value = state[name]
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.numel() > 10**6:
            state[name] = odd_value(random)
            continue
        state[name] = _odd_tensor(value, random)
        match random.randrange(8):
            case 0:
                del state[name]
            case 1:
                state[_odd_name(str(name), random)] = state.pop(name)
            case 2:
                state[name] = random.choice(list(state.values()))
    return state


def _odd_name(name: str, random: Random) -> Any:
    block = random.choice((7, 10**9, "x", ""))
    odd = (f"{name}x", name.replace("0", "9999999999"), f"blocks.{block}.w", f"core.{name}", "", 5)
    return random.choice(odd)


def _odd_tensor(value: torch.Tensor, random: Random) -> Any:
    """Returns a tensor of another shape, type or value, or something that is none."""
    value = value.reshape(1) if value.ndim == 0 else value
    odd_types = (torch.int64, torch.float64, torch.float16, torch.bool)
    match random.randrange(11):
        case 0:
            return value.flatten()
        case 1:
            return value.reshape(1, *value.shape)
        case 2:
            return value[..., :0]
        case 3:
            return torch.tensor(random.choice((0.0, float("nan"), 1e30)))
        case 4:
            return value.to(random.choice(odd_types))
        case 5 if value.is_floating_point():
            filled = torch.full(value.shape, random.choice((float("nan"), float("inf"), 1e30)))
            return filled.to(value.dtype)  # 1e30 is infinite in half precision
        case 6 if value.numel():
            return value.reshape(-1)[:1].expand(random.choice((2, 10**6, 10**12)))
        case 7:
            return value.transpose(0, -1).contiguous() if value.ndim > 1 else value[:-1]
        case 8 if value.is_floating_point():
            return random.choice((value.to_sparse(), torch.complex(value.float(), value.float())))
        case 9:
            return random.choice((None, [1, 2], "x", {"a": value}))
    return value


def damage_safetensors(content: bytes, random: Random) -> bytes:
    """Damages a safetensors file: its tensors, its header, or its bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    match random.randrange(3):
        case 0:
            header = damage_json(json.loads(content[8 : 8 + length]), random).encode("utf-8", "replace")
            return struct.pack("<Q", len(header)) + header + content[8 + length :]
        case 1:
            odd = damage_tensors(load(content), random)
            kept = {str(n): v.contiguous().clone() for n, v in odd.items() if _is_storable(v)}
            metadata = json.loads(content[8 : 8 + length]).get("__metadata__")
            return save(kept, metadata=metadata)
    return damage_bytes(content, random)


def _is_storable(value: Any) -> bool:
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex()
    return dense and value.numel() < 10**6


def damage_pth(content: bytes, state: dict[str, Any], random: Random, legacy: bool = False) -> bytes:
    """Damages what torch saved: the state dict, the pickle in the archive, or the bytes."""
    match random.randrange(3):
        case 0:
            return save_pth(damage_tensors(state, random), legacy)
        case 1 if not legacy:
            return _with_other_pickle(content, random)
    return damage_bytes(content, random)


def save_pth(state: Any, legacy: bool = False) -> bytes:
    """Returns what `torch.save` writes, in today's format or the one before 1.6."""
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def _with_other_pickle(content: bytes, random: Random) -> bytes:
    """Returns the archive with a damaged pickle: other bytes, or numbers that are wrong but well formed."""
    out = io.BytesIO()
    how = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", how) as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith("data.pkl"):
                data = _damage_pickle(data, random)
            new.writestr(member.filename, data)
    return out.getvalue()


def _damage_pickle(data: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return damage_bytes(data, random)
    numbers = [
        place for code, _, place in pickletools.genops(data) if code.name in ("BININT", "BININT1", "BININT2")
    ]
    changed = bytearray(data)
    for place in random.sample(numbers, min(len(numbers), random.choice((1, 2, 10)))):
        width = {b"J": 4, b"K": 1, b"M": 2}[bytes(changed[place : place + 1])]
        odd = random.choice((0, 1, 2**31 - 1, 2**15, random.randrange(2**31))) % 2 ** (
            8 * width - (width == 4)
        )
        changed[place + 1 : place + 1 + width] = odd.to_bytes(width, "little")
    return bytes(changed)
