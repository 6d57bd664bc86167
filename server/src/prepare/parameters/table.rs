//! Every parameter of the endpoints that take text: what it may be, what it is if absent, who else has it, and
//! what is to be known of it here. Requests are checked against this table before they are read, `/openapi.json`
//! describes them by it, and `docs/reference/api.md` is generated from that.
//!
//! What depends on the model (whether a token is in its vocabulary) or on other parameters is checked by whoever
//! resolves the parameter.

mod chat;
mod completions;
mod responses;
mod shared;
mod tokens;

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::kind::Kind;
use crate::error::Error;

/// An endpoint that takes parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Tokenize,
    Detokenize,
}

/// A parameter of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// What it is if absent, in words; empty for nothing.
    pub(crate) default: &'static str,
    pub(crate) required: bool,
    /// Of whom it is known.
    pub(crate) peers: Peers,
    /// What it does here.
    pub(crate) here: Here,
    /// What is to be known of it, above all where it differs from the others.
    pub(crate) note: &'static str,
}

/// Who has a parameter of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peers {
    pub(crate) ovms: Peer,
    pub(crate) openai: Peer,
    pub(crate) vllm: Peer,
}

/// Whether it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Has,
    /// With less to it than here.
    Partly,
    Lacks,
}

/// What a parameter does here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Here {
    /// What it says.
    Works,
    /// It is checked and has no effect, for the reason given.
    Accepted,
    /// A request with it is refused, for the reason given.
    Refused,
}

impl Endpoint {
    pub(crate) const ALL: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Tokenize, Self::Detokenize];

    /// Its parameters. What it has of its own goes before what it shares with others.
    pub(crate) fn parameters(self) -> impl Iterator<Item = &'static Parameter> {
        /// In the order of `ALL`, which is that of the variants.
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

    /// Checks every parameter that is given. What is not in the table is ignored, and `null` is absent.
    ///
    /// # Errors
    /// A value has the wrong type, is out of its range, or belongs to a parameter that is refused.
    pub(crate) fn check(self, request: &Map<String, Value>) -> Result<(), Error> {
        let given = self.parameters().filter_map(|parameter| {
            request.get(parameter.name).filter(|value| !value.is_null()).map(|value| (parameter, value))
        });
        for (parameter, value) in given {
            if parameter.here == Here::Refused {
                return Err(Error::coded("unsupported_parameter", parameter.name, parameter.note));
            }
            parameter.kind.check(parameter.name, value)?;
        }
        Ok(())
    }
}

/// Begins a row: name, kind, default, and whether OVMS, OpenAI and vLLM have it.
const fn row(name: &'static str, kind: Kind, default: &'static str, peers: Peers) -> Parameter {
    Parameter { name, kind, default, required: false, peers, here: Here::Works, note: "" }
}

impl Parameter {
    const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    const fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    const fn accepted(self, note: &'static str) -> Self {
        Self { here: Here::Accepted, note, ..self }
    }

    const fn refused(self, note: &'static str) -> Self {
        Self { here: Here::Refused, note, ..self }
    }
}

/// All have it.
const ALL: Peers = Peers { ovms: Peer::Has, openai: Peer::Has, vllm: Peer::Has };
const OVMS: Peers = Peers { ovms: Peer::Has, openai: Peer::Lacks, vllm: Peer::Lacks };
const OPENAI: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Has, vllm: Peer::Lacks };
const VLLM: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Lacks, vllm: Peer::Has };
const OVMS_OPENAI: Peers = Peers { ovms: Peer::Has, openai: Peer::Has, vllm: Peer::Lacks };
const OVMS_VLLM: Peers = Peers { ovms: Peer::Has, openai: Peer::Lacks, vllm: Peer::Has };
const OPENAI_VLLM: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Has, vllm: Peer::Has };
const OVMS_PARTLY: Peers = Peers { ovms: Peer::Partly, openai: Peer::Has, vllm: Peer::Has };
/// Nobody but `openvino_genai`.
const NOBODY: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Lacks, vllm: Peer::Lacks };

/// A token.
const TOKEN: Kind = Kind::Integer(0, u32::MAX as i64);
/// A count of tokens.
const COUNT: Kind = Kind::Integer(0, u32::MAX as i64);
