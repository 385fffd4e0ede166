"""What schemathesis does not know of itself: archives are bytes, and progress is JSON in lines."""
import json

import schemathesis


@schemathesis.serializer("application/x-tar")
def archive(ctx, value):
    return value.encode() if isinstance(value, str) else bytes(value)


@schemathesis.deserializer("application/x-ndjson")
def progress(ctx, response):
    """The last line, which has the result."""
    return json.loads(response.content.decode().strip().splitlines()[-1])


@schemathesis.deserializer("application/x-tar", "image/png")
def content(ctx, response):
    return response.content.decode("latin-1")
