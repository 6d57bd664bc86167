//! Responses that are being generated: [`assembly`] turns deltas into items and events, and [`live`] manages background
//! responses, whose [`events`] clients can follow. None of these modules depends on HTTP. The store contains responses
//! that have ended, and an initial record of each background response that is in progress.

mod assembly;
mod events;
mod live;
mod retained;

pub(crate) use assembly::{Assembly, LogprobFormat, NewResponse, encode};
pub(crate) use events::{FollowedEvents, ResponseEvents};
pub(crate) use live::{BackgroundResponse, BackgroundResponses, Interruption, LiveResponse};
pub(crate) use retained::{RetainedRequest, json_bytes};
