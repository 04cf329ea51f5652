"""Videos over HTTP, in the form of OpenAI's videos API: `outrider serve --media DIR`."""
