"""zerocast in torchtitan: converters that its configurations name.

torchtitan asks a converter for other things from release to release, so there is one module for
each way, and a user imports the one of the release at hand. Options have torchtitan's names and its
meaning, where it has them.

    config_converter   0.3: LinearConverter.Config among the ``converters`` of a model registry
    model_converter    0.2: ModelConverter, registered by name, reads ``quantize.linear.float8``

    options            what the options mean here, and which are refused
    layers             layers that open a region of :class:`zerocast.autocast` around themselves

Nothing else in zerocast knows torchtitan, and this package imports nothing of it before
``config_converter`` is imported.
"""
