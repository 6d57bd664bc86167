//! The table of the parameters of the endpoints that generate text or convert between text and tokens. For each
//! parameter, it contains the allowed values, the default, the other servers that have the parameter, and a note.
//! Requests are checked against this table before they are parsed. `/openapi.json` is generated from the table, and
//! `docs/reference/api.md` from `/openapi.json`.
//!
//! Rules that depend on the model (whether a token is in its vocabulary) or on other parameters are checked when the
//! parameter is resolved.

mod chat;
mod completions;
mod parameter;
mod responses;
mod shared;
mod tokens;

use std::sync::LazyLock;

use serde_json::{Map, Value};

pub(crate) use parameter::{Parameter, PeerSupport, Support};

use crate::error::Error;

/// An endpoint with parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Tokenize,
    Detokenize,
}

impl Endpoint {
    pub(crate) const ALL: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Tokenize, Self::Detokenize];

    /// Returns the parameters of the endpoint. Its own parameters override the shared ones.
    pub(crate) fn parameters(self) -> impl Iterator<Item = &'static Parameter> {
        /// The tables are in the order of `ALL`, which is the order of the variants.
        static TABLES: LazyLock<[Vec<&'static Parameter>; 5]> =
            LazyLock::new(|| Endpoint::ALL.map(|endpoint| endpoint.table().collect()));
        TABLES[self as usize].iter().copied()
    }

    fn table(self) -> impl Iterator<Item = &'static Parameter> {
        const SHARED: [&[Parameter]; 4] =
            [shared::CONVERSATION, shared::OUTPUT, shared::SAMPLING, shared::CANDIDATES];
        let (own, shared) = match self {
            Self::Chat => (chat::TABLE, &SHARED[..]),
            Self::Completions => (completions::TABLE, &SHARED[1..]),
            Self::Responses => (responses::TABLE, &SHARED[..]),
            Self::Tokenize => (tokens::TOKENIZE, &[][..]),
            Self::Detokenize => (tokens::DETOKENIZE, &[][..]),
        };
        let is_new = |parameter: &&Parameter| !own.iter().any(|known| known.name == parameter.name);
        own.iter().chain(shared.iter().copied().flatten().filter(is_new))
    }

    /// Checks every parameter of a request. Unknown parameters are ignored, and `null` is equivalent to an absent
    /// parameter.
    ///
    /// # Errors
    /// A value has the wrong type, is out of range, or belongs to an unsupported parameter.
    pub(crate) fn check(self, request: &Map<String, Value>) -> Result<(), Error> {
        let given = self.parameters().filter_map(|parameter| {
            request.get(parameter.name).filter(|value| !value.is_null()).map(|value| (parameter, value))
        });
        for (parameter, value) in given {
            if parameter.support == Support::Refused {
                return Err(Error::coded("unsupported_parameter", parameter.name, parameter.note));
            }
            parameter.kind.check(parameter.name, value)?;
        }
        Ok(())
    }
}
