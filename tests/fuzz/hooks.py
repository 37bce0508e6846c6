"""What Schemathesis is told of our answers: YAML may hold several documents, which its own reader does not take."""

import schemathesis
from schemathesis import DeserializationContext, Response
from schemathesis.core.media_types import YAML_MEDIA_TYPES


@schemathesis.deserializer(*YAML_MEDIA_TYPES)
def yaml_text(_context: DeserializationContext, response: Response) -> str:
    """The text itself, as the description has it."""
    return response.content.decode()
