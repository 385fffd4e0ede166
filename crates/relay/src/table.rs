//! Numbered entries, whose numbers are used again, and the keys by which epoll reports them.

/// What a key stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The VMM.
    Vmm,
    /// A published port.
    Port,
    /// The client's end of a connection.
    Client,
    /// The guest's end of a connection.
    Guest,
    /// The socket of a flow.
    Flow,
    /// The connection of a framed flow.
    Stream,
    /// The socket of a framed flow.
    Datagrams,
    /// The socket on which streams are handed over.
    Control,
    /// The client's end of a stream.
    StreamClient,
    /// The agent's end of a stream.
    StreamAgent,
    /// The line of a stream.
    Line,
}

const ALL: [What; 11] = [
    What::Vmm,
    What::Port,
    What::Client,
    What::Guest,
    What::Flow,
    What::Stream,
    What::Datagrams,
    What::Control,
    What::StreamClient,
    What::StreamAgent,
    What::Line,
];

/// An entry: its number, and which of those that have had the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// The number.
    pub at: u16,
    /// Differs between entries that have the number one after another.
    pub turn: u32,
}

impl Key {
    /// As epoll keeps it.
    #[must_use]
    pub fn pack(self, what: What) -> u64 {
        u64::from(self.turn) << 32 | (what as u64) << 16 | u64::from(self.at)
    }

    /// From what epoll reports.
    #[must_use]
    pub fn unpack(data: u64) -> Option<(What, Self)> {
        let [low, high, what, _, t0, t1, t2, t3] = data.to_le_bytes();
        let key = Self {
            at: u16::from_le_bytes([low, high]),
            turn: u32::from_le_bytes([t0, t1, t2, t3]),
        };
        Some((*ALL.get(usize::from(what))?, key))
    }
}

/// Entries, at most as many as the table was made for. It allocates only when it is made.
#[derive(Debug)]
pub struct Table<T> {
    entries: Vec<(u32, Option<T>)>,
    free: Vec<u16>,
}

impl<T> Table<T> {
    /// An empty table.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let most = u16::try_from(most).unwrap_or(u16::MAX);
        Self { entries: (0..most).map(|_| (0, None)).collect(), free: (0..most).rev().collect() }
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there may be no more entries.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// The key of the next entry; `None` if the table is full.
    #[must_use]
    pub fn next(&self) -> Option<Key> {
        let at = *self.free.last()?;
        Some(Key { at, turn: self.entries[usize::from(at)].0 })
    }

    /// Adds the entry that has the key of [`Self::next`]. One more than the table takes is dropped.
    pub fn add(&mut self, entry: T) {
        if let Some(at) = self.free.pop() {
            self.entries[usize::from(at)].1 = Some(entry);
        }
    }

    /// The entry with this key, if it is still there.
    pub fn get(&mut self, key: Key) -> Option<&mut T> {
        let (turn, entry) = self.entries.get_mut(usize::from(key.at))?;
        entry.as_mut().filter(|_| *turn == key.turn)
    }

    /// Removes the entry with this key, if it is still there.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let (turn, entry) = self.entries.get_mut(usize::from(key.at))?;
        if *turn != key.turn {
            return None;
        }
        let removed = entry.take()?;
        *turn = turn.wrapping_add(1);
        self.free.push(key.at);
        Some(removed)
    }

    /// All entries, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        (0_u16..).zip(&self.entries).filter_map(|(at, (turn, entry))| {
            entry.as_ref().map(|entry| (Key { at, turn: *turn }, entry))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_packed_and_unpacked() {
        let key = Key { at: 0xABCD, turn: 0xFEDC_BA98 };
        for what in ALL {
            assert_eq!(Key::unpack(key.pack(what)), Some((what, key)));
        }
        assert_eq!(Key::unpack(11 << 16), None);
    }

    #[test]
    fn a_number_that_is_used_again_has_another_key() {
        let mut table = Table::new(2);
        let first = table.next().unwrap();
        table.add('a');
        table.add('b');
        assert!(table.is_full() && table.next().is_none());
        assert_eq!(table.remove(first), Some('a'));
        assert_eq!(table.remove(first), None);
        let second = table.next().unwrap();
        assert_eq!(second.at, first.at);
        table.add('c');
        assert_eq!(table.get(first), None);
        assert_eq!(table.get(second), Some(&mut 'c'));
        assert_eq!(table.iter().map(|(_, entry)| *entry).collect::<String>(), "cb");
        assert_eq!(table.len(), 2);
    }
}
