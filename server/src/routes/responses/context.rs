//! Looks up the objects that a request refers to: the responses that it follows, its conversation, and individual
//! items. The total size of the stored items that a request includes is limited. If an object does not exist, the error
//! contains its ID.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use server_openai::responses::Item;

use crate::app::App;
use crate::error::Error;
use crate::prepare::responses::{Context, ItemReference, References};
use crate::responses::{LiveResponse, json_bytes};
use crate::store::{self, CHAIN_MAX, ChainError, Id, Kind, StoredItem, StoredRecord, check_room};
use crate::tenant::Tenant;

/// Total size, as JSON, of the stored items that a request includes: its history, and the items that it refers to.
///
/// If exceeded: 400, `context_length_exceeded`.
const CONTEXT_BYTES_MAX: u64 = 16 << 20;

/// Looks up objects for a tenant.
pub(crate) struct Lookup<'a> {
    app: &'a App,
    tenant: Tenant,
    /// Total size in bytes of the items that the request may still include.
    bytes_left: u64,
}

/// An item that a request refers to.
struct ReferencedItem<'a> {
    /// The first parameter that refers to the item.
    param: &'a str,
    item: Option<Arc<Item>>,
}

/// A response in a chain, or the owner of a referenced item.
pub(super) enum Link {
    /// The response is being generated or is about to be stored.
    Live(Arc<LiveResponse>),
    Stored(StoredRecord),
}

/// An item of a [`Link`]. A stored item has not been parsed yet.
pub(super) enum LinkItem<'a> {
    Live(Arc<Item>),
    Stored(StoredItem<'a>),
}

/// Looks up the objects that a request refers to. The lookup may block on disk I/O.
pub(super) fn find(app: &App, tenant: Tenant, references: &References) -> Result<Context, Error> {
    let mut lookup = Lookup::new(app, tenant);
    let history = match (&references.previous, &references.conversation) {
        (_, Some(conversation)) => lookup.conversation(conversation)?,
        (Some(previous), None) => lookup.followed(previous)?,
        (None, None) => Vec::new(),
    };
    let items = lookup.items(&references.items, &history)?;
    Ok(Context { history, items })
}

impl<'a> Lookup<'a> {
    pub(crate) fn new(app: &'a App, tenant: Tenant) -> Self {
        Self { app, tenant, bytes_left: CONTEXT_BYTES_MAX }
    }

    /// Returns the items of a conversation, which must not be full.
    fn conversation(&mut self, name: &str) -> Result<Vec<Arc<Item>>, Error> {
        let stored = conversation(self.app, self.tenant, name)?;
        check_room(stored.counts(), stored.bytes()).map_err(|error| Error::invalid("conversation", error))?;
        stored.input().map(|item| self.include(&item.map_err(damaged)?, "conversation")).collect()
    }

    /// Returns the items of the response `name` and of all responses that it follows, oldest first.
    fn followed(&mut self, name: &str) -> Result<Vec<Arc<Item>>, Error> {
        const PARAM: &str = "previous_response_id";
        let lost = |id: &str| Error::NotStored {
            code: "previous_response_not_found",
            param: Some(PARAM.to_owned()),
            message: if id == name {
                format!("{PARAM}: the response {id:?} is not stored; it may have been deleted")
            } else {
                format!("{PARAM}: the response {name:?} follows {id:?}, which is no longer stored")
            },
        };
        let chain = Chain::of(self.app, self.tenant, name)?.map_err(|id| lost(&id))?;
        let mut history = Vec::new();
        for number in (0..chain.len()).rev() {
            let link = chain.link(number)?.map_err(|id| lost(&id))?;
            if number == 0 && !link.is_final() {
                let problem = format!("the response {name:?} is still being generated");
                return Err(Error::invalid(PARAM, problem));
            }
            for item in link.items(Part::All)? {
                history.push(self.include_linked(&item, PARAM)?);
            }
        }
        Ok(history)
    }

    /// Returns the referenced items, in the order of the references. Each record is read once.
    ///
    /// # Errors
    /// An item does not exist, or the items together are too large.
    pub(crate) fn referenced(&mut self, references: &[ItemReference]) -> Result<Vec<Arc<Item>>, Error> {
        self.items(references, &[])
    }

    /// Returns the referenced items. Repeated references, and references to items of the history, are rejected later,
    /// together with other duplicates.
    fn items(
        &mut self,
        references: &[ItemReference],
        history: &[Arc<Item>],
    ) -> Result<Vec<Arc<Item>>, Error> {
        let mut referenced: HashMap<&str, ReferencedItem<'_>> = HashMap::new();
        for ItemReference { param, id } in references {
            referenced.entry(id).or_insert(ReferencedItem { param, item: None });
        }
        for item in history {
            if let Some(found) = referenced.get_mut(item.id()) {
                found.item = Some(Arc::clone(item));
            }
        }
        let missing = referenced.iter().filter(|(_, found)| found.item.is_none());
        let ids = missing.filter_map(|(id, _)| Id::parse(id)).filter(|id| id.kind() == Kind::Item);
        let owners: HashSet<Id> = ids.map(|id| id.owner(Kind::Response)).collect();
        for owner in owners {
            self.items_of(owner, &mut referenced)?;
        }
        let item = |reference: &ItemReference| {
            let found = referenced.get(reference.id.as_str()).and_then(|found| found.item.clone());
            found.ok_or_else(|| reference.not_found())
        };
        references.iter().map(item).collect()
    }

    /// Looks up the referenced items that belong to the response `owner`, or to the conversation whose ID has the same
    /// digits.
    fn items_of(
        &mut self,
        owner: Id,
        referenced: &mut HashMap<&str, ReferencedItem<'_>>,
    ) -> Result<(), Error> {
        let link = match link(self.app, self.tenant, owner)? {
            Some(link) => link,
            None => match stored(self.app, self.tenant, owner.owner(Kind::Conversation))? {
                Some(conversation) => Link::Stored(conversation),
                None => return Ok(()),
            },
        };
        for item in link.items(Part::All)? {
            if let Some(found) = referenced.get_mut(item.id()).filter(|found| found.item.is_none()) {
                self.count_bytes(item.bytes(), found.param)?;
                found.item = Some(item.parse()?);
            }
        }
        Ok(())
    }

    fn include_linked(&mut self, item: &LinkItem<'_>, param: &str) -> Result<Arc<Item>, Error> {
        self.count_bytes(item.bytes(), param)?;
        item.parse()
    }

    fn include(&mut self, item: &StoredItem<'_>, param: &str) -> Result<Arc<Item>, Error> {
        self.count_bytes(item.bytes(), param)?;
        Ok(Arc::new(item.parse().map_err(damaged)?))
    }

    fn count_bytes(&mut self, bytes: u64, param: &str) -> Result<(), Error> {
        self.bytes_left = self.bytes_left.checked_sub(bytes).ok_or_else(|| {
            let problem = format!(
                "the history of the request and the stored items to which the request refers have more than \
                 {CONTEXT_BYTES_MAX} bytes in total; start a new conversation from a summary of the history"
            );
            Error::coded("context_length_exceeded", param, problem)
        })?;
        Ok(())
    }
}

/// A response and the responses that it follows, latest first.
pub(super) struct Chain<'a> {
    app: &'a App,
    tenant: Tenant,
    live: Option<Arc<LiveResponse>>,
    stored: Vec<Id>,
}

/// The part of a response's items to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Input,
    /// Return the input and the output.
    All,
}

impl<'a> Chain<'a> {
    /// Returns the chain of this response, or the ID of the first missing response in the chain.
    pub(super) fn of(app: &'a App, tenant: Tenant, name: &str) -> Result<Result<Self, String>, Error> {
        let live = app.background().find(name, tenant);
        let next = match &live {
            Some(live) => live.previous_response_id(),
            None => Some(name.to_owned()),
        };
        let stored = match next.as_deref() {
            None => Vec::new(),
            Some(next) => {
                let Some(id) = response_id(next) else { return Ok(Err(next.to_owned())) };
                match app.store().chain(id, tenant) {
                    Ok(chain) => chain,
                    Err(ChainError::Lost(id)) => return Ok(Err(id.to_string())),
                    Err(ChainError::TooLong) => return Err(too_long(name)),
                }
            }
        };
        let chain = Self { app, tenant, live, stored };
        if chain.len() > CHAIN_MAX { Err(too_long(name)) } else { Ok(Ok(chain)) }
    }

    /// Returns a chain that consists only of this response.
    pub(super) fn of_one(app: &'a App, tenant: Tenant, name: &str) -> Self {
        let live = app.background().find(name, tenant);
        let stored = if live.is_some() { None } else { response_id(name) };
        Self { app, tenant, live, stored: stored.into_iter().collect() }
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.live.is_some()) + self.stored.len()
    }

    /// Returns the response with this index, or its ID if it no longer exists.
    pub(super) fn link(&self, number: usize) -> Result<Result<Link, String>, Error> {
        let number = match (&self.live, number.checked_sub(1)) {
            (Some(live), None) => return Ok(Ok(Link::Live(Arc::clone(live)))),
            (Some(_), Some(number)) => number,
            (None, _) => number,
        };
        let id = self.stored[number];
        Ok(stored(self.app, self.tenant, id)?.map(Link::Stored).ok_or_else(|| id.to_string()))
    }
}

fn too_long(name: &str) -> Error {
    let problem = format!(
        "the chain of responses up to {name:?} has more than {CHAIN_MAX} responses; start a new conversation from a \
         summary of these responses"
    );
    Error::invalid("previous_response_id", problem)
}

impl Link {
    fn is_final(&self) -> bool {
        match self {
            Self::Live(live) => live.is_final(),
            // Only live responses are still being generated. If a stored record says that its response is in progress,
            // the process that generated the response has ended.
            Self::Stored(_) => true,
        }
    }

    /// Returns the items, oldest first.
    pub(super) fn items(&self, part: Part) -> Result<Vec<LinkItem<'_>>, Error> {
        match self {
            Self::Live(live) => {
                let output = if part == Part::All { live.response().output } else { Vec::new() };
                let output = output.into_iter().map(Arc::new);
                Ok(live.input().iter().cloned().chain(output).map(LinkItem::Live).collect())
            }
            Self::Stored(stored) => {
                let output = stored.output().filter(|_| part == Part::All);
                let items = stored.input().chain(output).map(|item| item.map(LinkItem::Stored));
                items.collect::<Result<_, _>>().map_err(damaged)
            }
        }
    }
}

impl LinkItem<'_> {
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Live(item) => item.id(),
            Self::Stored(item) => &item.id,
        }
    }

    /// Returns the size of the item as JSON.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Live(item) => json_bytes(item),
            Self::Stored(item) => item.bytes(),
        }
    }

    pub(super) fn parse(&self) -> Result<Arc<Item>, Error> {
        match self {
            Self::Live(item) => Ok(Arc::clone(item)),
            Self::Stored(item) => Ok(Arc::new(item.parse().map_err(damaged)?)),
        }
    }
}

fn response_id(name: &str) -> Option<Id> {
    Id::parse(name).filter(|id| id.kind() == Kind::Response)
}

fn link(app: &App, tenant: Tenant, id: Id) -> Result<Option<Link>, Error> {
    if let Some(live) = app.background().find(&id.to_string(), tenant) {
        return Ok(Some(Link::Live(live)));
    }
    Ok(stored(app, tenant, id)?.map(Link::Stored))
}

fn stored(app: &App, tenant: Tenant, id: Id) -> Result<Option<StoredRecord>, Error> {
    app.store().get(id, tenant).map_err(|error| unreadable(&error))
}

pub(super) fn response(app: &App, tenant: Tenant, name: &str) -> Result<Option<StoredRecord>, Error> {
    response_id(name).map_or(Ok(None), |id| stored(app, tenant, id))
}

pub(crate) fn conversation(app: &App, tenant: Tenant, name: &str) -> Result<StoredRecord, Error> {
    let id = Id::parse(name).filter(|id| id.kind() == Kind::Conversation);
    let found = id.map_or(Ok(None), |id| stored(app, tenant, id))?;
    found.ok_or_else(|| no_conversation(name))
}

pub(crate) fn no_conversation(name: &str) -> Error {
    Error::NotStored {
        code: "conversation_not_found",
        param: Some("conversation".to_owned()),
        message: format!("conversation: the conversation {name:?} is not stored; it may have been deleted"),
    }
}

/// Returns the error for a stored record that cannot be read or written.
pub(crate) fn unreadable(error: &store::Error) -> Error {
    tracing::error!(error = error as &dyn std::error::Error, "failed to access a stored object");
    Error::Internal("failed to access a stored object".to_owned())
}

/// Returns the error for a stored record with damaged content.
#[expect(clippy::needless_pass_by_value, reason = "the function is passed to `map_err`")]
pub(crate) fn damaged(error: serde_json::Error) -> Error {
    tracing::error!(error = &error as &dyn std::error::Error, "a stored object is damaged");
    Error::Internal("a stored object is damaged".to_owned())
}
