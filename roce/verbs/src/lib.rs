//! Work requests, completions, attributes and the Provider trait (types only).
