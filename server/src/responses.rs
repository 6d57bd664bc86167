//! Responses in the making: [`assembly`] turns deltas into items and events, [`live`] holds those that are made in
//! the background. Neither knows HTTP, and neither keeps anything once it is made: that is the store's.

mod assembly;
mod live;
mod retained;

pub(crate) use assembly::{Assembly, Begun, Show, sent};
pub(crate) use live::{Background, Followed, Interruption, Live, LiveResponse};
pub(crate) use retained::{RetainedInput, json_bytes};
