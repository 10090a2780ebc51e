"""Parts of benchmark reports with made-up figures."""

from msgspec.inspect import DictType, FloatType, IntType, ListType, StrType, StructType, UnionType, type_info


def filled(record, /, **values):
    """Returns a record of a report; required fields that are not given are empty, 1, or None."""
    empty = {IntType: 1, FloatType: 1.0, StrType: "", ListType: [], DictType: {}, UnionType: None}
    for field in type_info(record).fields:
        if field.required and field.name not in values:
            is_record = isinstance(field.type, StructType)
            values[field.name] = filled(field.type.cls) if is_record else empty[type(field.type)]
    return record(**values)
