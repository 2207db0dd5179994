//! The errors of long messages, which wait until a receive has matched them.

use dist_transport::announced::MatchedFrame;
use dist_transport::{Activity, Error as TransportError, Fingerprint};

use super::Send;
use crate::engine::Engine;
use crate::{Call, ElementType, Error};

impl Engine {
    /// Returns the error of the send of a call that no receive has matched in time, if the transport failed for that.
    #[cold]
    pub(super) fn not_received_in(&self, sends: &[Send<'_>], source: &TransportError) -> Option<Error> {
        let sends = sends.iter().map(|(encoded, send)| (send.to, encoded, send.len()));
        self.not_received(sends, source)
    }

    /// Returns the error of the send of a started operation that no receive has matched in time, likewise.
    #[cold]
    pub(super) fn started_not_received(&self, number: u64, source: &TransportError) -> Option<Error> {
        let sends = self.messages.started.sends.iter().filter(|send| send.operation == number);
        let sends = sends.map(|send| (send.to, &send.encoded, send.memory.bytes().len()));
        self.not_received(sends, source)
    }

    fn not_received<'a>(
        &self,
        mut sends: impl Iterator<Item = (usize, &'a Fingerprint, usize)>,
        source: &TransportError,
    ) -> Option<Error> {
        let TransportError::Timeout { activity: Activity::Match, peer, elapsed, limit, waits, count } =
            source
        else {
            return None;
        };
        let (peer, elapsed, limit, waits, count) = (*peer, *elapsed, *limit, waits.clone(), *count);
        let is_meant = |&(to, _, len): &(usize, &Fingerprint, usize)| {
            self.in_world(to) == peer && MatchedFrame::announces(len)
        };
        let (_, encoded, bytes) = sends.find(is_meant)?;
        let call = Call::decode(encoded)?;
        let size = call.element.map_or(1, ElementType::size);
        let call = Box::new(Call { count: (bytes / size) as u64, ..call });
        let activity = Activity::Match;
        let source = TransportError::Timeout { activity, peer, elapsed, limit, waits, count }.into();
        Some(Error::NotReceived { call, peer, bytes, source })
    }
}
