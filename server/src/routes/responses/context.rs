//! Looks up what a request refers to: the responses that it follows, its conversation, and single items. A request may
//! bring in so many bytes of stored items and no more, however often it refers to one; what does not exist is an error
//! that names it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use server_openai::responses::{Item, Response};

use crate::app::App;
use crate::error::Error;
use crate::prepare::responses::{Context, ItemReference, References};
use crate::responses::{Live, json_bytes};
use crate::store::{self, CHAIN_MAX, ChainError, Id, Kind, Stored, StoredItem, check_room};
use crate::tenant::Tenant;

/// Total size, as JSON, of the stored items that a request brings in: its history and each use of a reference.
///
/// Beyond it: 400, `context_length_exceeded`.
const CONTEXT_BYTES_MAX: u64 = 16 << 20;

/// Who looks things up, and how much more may be brought in.
pub(in crate::routes) struct Lookup<'a> {
    app: &'a App,
    tenant: Tenant,
    bytes_left: u64,
}

/// A stored item that a request brings in.
struct Brought {
    item: Arc<Item>,
    bytes: u64,
}

/// An item that a request refers to.
struct Wanted<'a> {
    /// The first parameter that names it.
    param: &'a str,
    uses: u64,
    item: Option<Arc<Item>>,
}

/// A response of a chain.
pub(super) enum Link {
    /// It is being made, or about to be stored.
    Live(Arc<Live>),
    Stored(Stored),
}

/// An item of a link, which need not have been parsed.
pub(super) enum LinkItem<'a> {
    Live(Arc<Item>),
    Stored(StoredItem<'a>),
}

/// Looks up what a request refers to. It may wait for the disk.
pub(super) fn find(app: &App, tenant: Tenant, references: &References) -> Result<Context, Error> {
    let mut lookup = Lookup::new(app, tenant);
    let history = match (&references.previous, &references.conversation) {
        (_, Some(conversation)) => lookup.conversation(conversation)?,
        (Some(previous), None) => lookup.followed(previous)?,
        (None, None) => Vec::new(),
    };
    let items = lookup.items(&references.items, &history)?;
    Ok(Context { history: history.into_iter().map(|brought| brought.item).collect(), items })
}

impl<'a> Lookup<'a> {
    pub(in crate::routes) fn new(app: &'a App, tenant: Tenant) -> Self {
        Self { app, tenant, bytes_left: CONTEXT_BYTES_MAX }
    }

    /// The items of a conversation that can take more of them.
    fn conversation(&mut self, name: &str) -> Result<Vec<Brought>, Error> {
        let stored = conversation(self.app, self.tenant, name)?;
        check_room(stored.tally(), stored.bytes()).map_err(|error| Error::invalid("conversation", error))?;
        stored.input().map(|item| self.bring(&item.map_err(damaged)?, "conversation")).collect()
    }

    /// All items up to the end of this response, oldest first.
    fn followed(&mut self, name: &str) -> Result<Vec<Brought>, Error> {
        const PARAM: &str = "previous_response_id";
        let lost = |id: &str| Error::NotKept {
            code: "previous_response_not_found",
            param: Some(PARAM.to_owned()),
            message: if id == name {
                format!("{PARAM}: the response {id:?} is not kept here, or no more")
            } else {
                format!("{PARAM}: {name:?} follows {id:?}, which is not kept any more")
            },
        };
        let chain = Chain::of(self.app, self.tenant, name)?.map_err(|id| lost(&id))?;
        let mut history = Vec::new();
        for number in (0..chain.len()).rev() {
            let link = chain.link(number)?.map_err(|id| lost(&id))?;
            if number == 0 && !link.is_final()? {
                return Err(Error::invalid(PARAM, format!("the response {name:?} is still being made")));
            }
            for item in link.items(Part::All)? {
                history.push(self.bring_linked(item, PARAM)?);
            }
        }
        Ok(history)
    }

    /// The items that are referred to, in the order of the references. Each record is read once.
    ///
    /// # Errors
    /// One of them does not exist, or they are too large together.
    pub(in crate::routes) fn referenced(
        &mut self,
        references: &[ItemReference],
    ) -> Result<Vec<Arc<Item>>, Error> {
        self.items(references, &[])
    }

    fn items(&mut self, references: &[ItemReference], history: &[Brought]) -> Result<Vec<Arc<Item>>, Error> {
        let mut wanted: HashMap<&str, Wanted<'_>> = HashMap::new();
        for reference in references {
            let wanted = wanted.entry(&reference.id);
            wanted.or_insert(Wanted { param: &reference.param, uses: 0, item: None }).uses += 1;
        }
        for Brought { item, bytes } in history {
            if let Some(wanted) = wanted.get_mut(item.id()).filter(|wanted| wanted.item.is_none()) {
                self.take_uses(*bytes, wanted)?;
                wanted.item = Some(Arc::clone(item));
            }
        }
        let missing = wanted.iter().filter(|(_, wanted)| wanted.item.is_none());
        let names = missing.filter_map(|(id, _)| Id::parse(id)).filter(|id| id.kind() == Kind::Item);
        let owners: HashSet<Id> = names.map(|id| id.owner(Kind::Response)).collect();
        for owner in owners {
            self.items_of(owner, &mut wanted)?;
        }
        let item = |reference: &ItemReference| {
            let found = wanted.get(reference.id.as_str()).and_then(|wanted| wanted.item.clone());
            found.ok_or_else(|| reference.not_found())
        };
        references.iter().map(item).collect()
    }

    /// Those wanted items that belong to this response, or to the conversation with the same number.
    fn items_of(&mut self, owner: Id, wanted: &mut HashMap<&str, Wanted<'_>>) -> Result<(), Error> {
        let link = match link(self.app, self.tenant, owner)? {
            Some(link) => link,
            None => match stored(self.app, self.tenant, owner.owner(Kind::Conversation))? {
                Some(conversation) => Link::Stored(conversation),
                None => return Ok(()),
            },
        };
        for item in link.items(Part::All)? {
            if let Some(wanted) = wanted.get_mut(item.id()).filter(|wanted| wanted.item.is_none()) {
                self.take_uses(item.bytes(), wanted)?;
                wanted.item = Some(item.parse()?);
            }
        }
        Ok(())
    }

    /// Each use of an item counts: the prompt repeats it as often as the request refers to it.
    fn take_uses(&mut self, bytes: u64, wanted: &Wanted<'_>) -> Result<(), Error> {
        self.take(bytes.saturating_mul(wanted.uses), wanted.param)
    }

    fn bring_linked(&mut self, item: LinkItem<'_>, param: &str) -> Result<Brought, Error> {
        match item {
            LinkItem::Stored(item) => self.bring(&item, param),
            LinkItem::Live(item) => {
                let bytes = json_bytes(&item);
                self.take(bytes, param)?;
                Ok(Brought { item, bytes })
            }
        }
    }

    fn bring(&mut self, item: &StoredItem<'_>, param: &str) -> Result<Brought, Error> {
        self.take(item.bytes(), param)?;
        Ok(Brought { item: Arc::new(item.parse().map_err(damaged)?), bytes: item.bytes() })
    }

    fn take(&mut self, bytes: u64, param: &str) -> Result<(), Error> {
        self.bytes_left = self.bytes_left.checked_sub(bytes).ok_or_else(|| {
            let problem = format!(
                "the stored items that the request brings in have more than {CONTEXT_BYTES_MAX} bytes; start a new \
                 conversation with what matters"
            );
            Error::coded("context_length_exceeded", param, problem)
        })?;
        Ok(())
    }
}

/// A response and those that it follows, latest first.
pub(super) struct Chain<'a> {
    app: &'a App,
    tenant: Tenant,
    live: Option<Arc<Live>>,
    stored: Vec<Id>,
}

/// Which items of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Input,
    /// The input and the output.
    All,
}

impl<'a> Chain<'a> {
    /// The chain of this response. If one of it does not exist: its name.
    pub(super) fn of(app: &'a App, tenant: Tenant, name: &str) -> Result<Result<Self, String>, Error> {
        let live = app.background().find(name, tenant);
        let next = match &live {
            Some(live) => live.response().previous_response_id,
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

    /// A chain of this response alone.
    pub(super) fn of_one(app: &'a App, tenant: Tenant, name: &str) -> Self {
        let live = app.background().find(name, tenant);
        let stored = if live.is_some() { None } else { response_id(name) };
        Self { app, tenant, live, stored: stored.into_iter().collect() }
    }

    pub(super) fn len(&self) -> usize {
        usize::from(self.live.is_some()) + self.stored.len()
    }

    /// The response of this number. If it does not exist any more: its name.
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
    let problem = format!("{name:?} follows more than {CHAIN_MAX} responses; begin anew with what matters");
    Error::invalid("previous_response_id", problem)
}

impl Link {
    fn is_final(&self) -> Result<bool, Error> {
        match self {
            Self::Live(live) => Ok(live.is_final()),
            Self::Stored(stored) => Ok(stored.head::<Response>().map_err(damaged)?.status.is_final()),
        }
    }

    /// The items, oldest first.
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

    /// The size of its JSON.
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

fn stored(app: &App, tenant: Tenant, id: Id) -> Result<Option<Stored>, Error> {
    app.store().get(id, tenant).map_err(|error| unreadable(&error))
}

/// A stored response.
pub(super) fn response(app: &App, tenant: Tenant, name: &str) -> Result<Option<Stored>, Error> {
    response_id(name).map_or(Ok(None), |id| stored(app, tenant, id))
}

/// A stored conversation.
pub(in crate::routes) fn conversation(app: &App, tenant: Tenant, name: &str) -> Result<Stored, Error> {
    let id = Id::parse(name).filter(|id| id.kind() == Kind::Conversation);
    let found = id.map_or(Ok(None), |id| stored(app, tenant, id))?;
    found.ok_or_else(|| no_conversation(name))
}

pub(in crate::routes) fn no_conversation(name: &str) -> Error {
    Error::NotKept {
        code: "conversation_not_found",
        param: Some("conversation".to_owned()),
        message: format!("conversation: {name:?} is not kept here, or no more"),
    }
}

/// A stored record cannot be read.
pub(in crate::routes) fn unreadable(error: &store::Error) -> Error {
    tracing::error!(error = error as &dyn std::error::Error, "failed to read a stored object");
    Error::Internal("failed to read a stored object".to_owned())
}

/// The content of a stored record is not what was written.
#[expect(clippy::needless_pass_by_value, reason = "it is passed to `map_err`")]
pub(in crate::routes) fn damaged(error: serde_json::Error) -> Error {
    tracing::error!(error = &error as &dyn std::error::Error, "a stored object is damaged");
    Error::Internal("a stored object is damaged".to_owned())
}
