//! The alternative spellings of paths that OVMS accepts. Routers and servers must interpret them in the same way.

use std::borrow::Cow;

/// Returns the standard spelling of a path: removes one trailing slash and replaces `/v3/v1/…` with `/v3/…`. Servers
/// accept the other spellings with `--ovms-compat`. Routers handle all spellings alike, but forward the path unchanged,
/// so that servers without this flag still reject the other spellings.
#[must_use]
pub fn standard_path(path: &str) -> Cow<'_, str> {
    let short = path.strip_suffix('/').filter(|short| !short.is_empty()).unwrap_or(path);
    match short.strip_prefix("/v3/v1").filter(|rest| rest.starts_with('/')) {
        Some(rest) => Cow::Owned(format!("/v3{rest}")),
        None => Cow::Borrowed(short),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternative_spellings_map_to_the_path() {
        for (given, path) in [
            ("/v3/v1/chat/completions", "/v3/chat/completions"),
            ("/v3/v1/models/", "/v3/models"),
            ("/v3/responses/resp_1/input_items/", "/v3/responses/resp_1/input_items"),
            ("/tokenize/", "/tokenize"),
            ("/v1/responses//", "/v1/responses/"),
            ("/v3/v1", "/v3/v1"),
            ("/v3/v1x/models", "/v3/v1x/models"),
            ("/v1/models", "/v1/models"),
            ("/", "/"),
        ] {
            assert_eq!(standard_path(given), path);
        }
    }
}
