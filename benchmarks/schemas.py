"""Random JSON schemas of the kinds that published suites have; every string and array in them is bounded."""


def random_schema(choose, depth=3):
    """A schema that any output must fit, and that a small model's outputs come to an end with.

    Args:
        choose: A random.Random.
        depth: How deep objects and arrays may be nested.
    """
    if depth == 3 and choose.random() < 0.2:
        return _with_definitions(choose)
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    if depth:
        kinds += ["object"] * 6 + ["array"] * 3 + ["anyOf", "tuple", "nullable"]
    return _KINDS[choose.choice(kinds)](choose, depth)


def _object(choose, depth):
    names = choose.sample(
        ["name", "age", "kind", "tags", "first name", "größe", 'a"b', "id", "$x", "value"], choose.randint(0, 4)
    )
    properties = {name: random_schema(choose, depth - 1) for name in names}
    required = [name for name in names if choose.random() < 0.7]
    made = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return made


def _array(choose, depth):
    least = choose.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(choose, depth - 1),
        "minItems": least,
        "maxItems": least + choose.randint(0, 2),
    }


def _string(choose, depth):
    least = choose.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + choose.randint(0, 8)}


def _integer(choose, depth):
    low = choose.randint(-50, 100)
    return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 2000)}


def _number(choose, depth):
    return {"type": "number", "minimum": choose.randint(-5, 0), "maximum": choose.randint(1, 90), "multipleOf": 0.25}


def _enum(choose, depth):
    return {
        "enum": choose.sample(
            ["red", "green", 'quo"te', 3, 4.5, None, True, "ü", ["a", 1], {"k": "v"}], choose.randint(1, 5)
        )
    }


def _const(choose, depth):
    return {"const": choose.choice(["fixed", 7, {"a": [1, 2]}, "line\nbreak"])}


def _pattern(choose, depth):
    return {
        "type": "string",
        "pattern": choose.choice([r"^[A-Z]{2}-[0-9]{3}$", r"^(abc|x{2,4})?$", r"^\d{4}$", '^[^"]{1,3}$']),
    }


def _format(choose, depth):
    return {"type": "string", "format": choose.choice(["date", "uuid", "ipv4", "ipv6"])}


def _any_of(choose, depth):
    return {"anyOf": [random_schema(choose, depth - 1) for _ in range(choose.randint(1, 3))]}


def _with_definitions(choose):
    """A list of lists, and a shared part; references are to the whole."""
    node = {"value": {"$ref": "#/$defs/part"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}}
    leaf = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    made = {"type": "object", "properties": node, "required": [*node], "additionalProperties": False}
    return made | {"$defs": {"part": random_schema(choose, 0), "leaf": leaf}}


def _tuple(choose, depth):
    parts = [random_schema(choose, depth - 1) for _ in range(choose.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _nullable(choose, depth):
    return {"type": [choose.choice(["integer", "boolean"]), "null"], "minimum": 0, "maximum": 99}


_KINDS = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda choose, depth: {"type": "boolean"},
    "null": lambda choose, depth: {"type": "null"},
    "enum": _enum,
    "const": _const,
    "pattern": _pattern,
    "format": _format,
    "anyOf": _any_of,
    "tuple": _tuple,
    "nullable": _nullable,
}
