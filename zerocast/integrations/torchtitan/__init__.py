"""zerocast in torchtitan 0.3: a converter that its configurations name.

Options have torchtitan's names and its meaning, where it has them.

    config_converter   LinearConverter.Config, among the ``converters`` of a model registry
    options            what the options mean here, and which are refused
    layers             layers that open a region of :class:`zerocast.autocast` around themselves

Nothing else in zerocast knows torchtitan, and this package imports nothing of it before
``config_converter`` is imported.
"""
