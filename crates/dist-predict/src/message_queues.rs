//! Queues of messages that have been sent and not yet received, for all ranks together.

/// For every rank, a linked list of messages in the order in which they were sent.
#[derive(Debug)]
pub(crate) struct MessageQueues<M> {
    queues: Vec<ListEnds>,
    entries: Vec<QueuedMessage<M>>,
    /// The first entry of the list of unused entries.
    free: u32,
}

#[derive(Clone, Copy, Debug)]
struct ListEnds {
    head: u32,
    tail: u32,
}

#[derive(Clone, Copy, Debug)]
struct QueuedMessage<M> {
    message: M,
    from: u32,
    next: u32,
}

/// The end of a list.
const NONE: u32 = u32::MAX;

impl<M: Copy> MessageQueues<M> {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { queues: vec![ListEnds { head: NONE, tail: NONE }; ranks], entries: Vec::new(), free: NONE }
    }

    /// Adds a message for a rank. Returns `false` if there are too many messages.
    #[must_use]
    pub(crate) fn push(&mut self, from: u32, to: usize, message: M) -> bool {
        let entry = QueuedMessage { message, from, next: NONE };
        let at = if self.free == NONE {
            let Ok(at) = u32::try_from(self.entries.len()) else { return false };
            if at == NONE {
                return false;
            }
            self.entries.push(entry);
            at
        } else {
            let at = self.free;
            self.free = self.entries[at as usize].next;
            self.entries[at as usize] = entry;
            at
        };
        let ends = &mut self.queues[to];
        let last = std::mem::replace(&mut ends.tail, at);
        if last == NONE {
            ends.head = at;
        } else {
            self.entries[last as usize].next = at;
        }
        true
    }

    /// Removes and returns the oldest message from one rank to another.
    pub(crate) fn take(&mut self, from: u32, to: usize) -> Option<M> {
        let ends = &mut self.queues[to];
        let (mut before, mut at) = (NONE, ends.head);
        while at != NONE && self.entries[at as usize].from != from {
            before = at;
            at = self.entries[at as usize].next;
        }
        if at == NONE {
            return None;
        }
        let QueuedMessage { message, next, .. } = self.entries[at as usize];
        if before == NONE {
            ends.head = next;
        } else {
            self.entries[before as usize].next = next;
        }
        if next == NONE {
            ends.tail = before;
        }
        self.entries[at as usize].next = self.free;
        self.free = at;
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TimedMessage;

    #[test]
    fn messages_of_one_rank_stay_in_order_between_those_of_others() {
        let mut message_queues = MessageQueues::new(2);
        let message = |bytes| TimedMessage { first: 0.0, last: 0.0, bytes };
        for bytes in 0..6 {
            assert!(message_queues.push(bytes % 2, 1, message(bytes.into())));
        }
        let mut take = |from| message_queues.take(from, 1).map(|message| message.bytes);
        assert_eq!([take(1), take(1), take(0), take(1), take(1)], [Some(1), Some(3), Some(0), Some(5), None]);
        assert_eq!([take(0), take(0), take(0)], [Some(2), Some(4), None]);
        assert!(message_queues.push(7, 1, message(9)) && message_queues.entries.len() == 6);
        assert_eq!(message_queues.take(7, 1).map(|message| message.bytes), Some(9));
    }
}
