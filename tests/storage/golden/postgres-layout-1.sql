SELECT pg_catalog.set_config('search_path', '', false);
CREATE SCHEMA perdure;
CREATE TABLE perdure.bases (
    session bigint NOT NULL,
    document_id bigint NOT NULL,
    seq bigint NOT NULL,
    version bigint NOT NULL,
    value bytea NOT NULL
);
CREATE TABLE perdure.contents (
    session bigint NOT NULL,
    digest bytea NOT NULL,
    size bigint NOT NULL,
    packing smallint NOT NULL,
    data bytea NOT NULL
);
ALTER TABLE ONLY perdure.contents ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE perdure.conversations (
    session bigint NOT NULL,
    id bigint NOT NULL,
    owner bigint,
    parent bigint,
    forked_at bigint,
    body bytea NOT NULL
);
CREATE TABLE perdure.deltas (
    session bigint NOT NULL,
    document_id bigint NOT NULL,
    seq bigint NOT NULL,
    ops bytea NOT NULL
);
CREATE TABLE perdure.documents (
    session bigint NOT NULL,
    id bigint NOT NULL,
    scope text NOT NULL,
    scope_id bigint NOT NULL,
    kind text NOT NULL,
    key bytea NOT NULL,
    created_seq bigint NOT NULL,
    retired_seq bigint,
    body bytea NOT NULL
);
CREATE TABLE perdure.entries (
    session bigint NOT NULL,
    id bigint NOT NULL,
    conversation_id bigint NOT NULL,
    head bigint,
    body bytea NOT NULL
);
CREATE TABLE perdure.mailbox (
    session bigint NOT NULL,
    id bigint NOT NULL,
    kind text NOT NULL,
    body bytea NOT NULL,
    posted_at bigint NOT NULL,
    answered_seq bigint,
    ok smallint,
    result bytea
);
CREATE TABLE perdure.mailboxes (
    session bigint NOT NULL,
    last bigint NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE perdure.pins (
    session bigint NOT NULL,
    pin bigint NOT NULL,
    digest bytea NOT NULL
);
CREATE TABLE perdure.sessions (
    id bigint NOT NULL,
    name text NOT NULL,
    format integer NOT NULL,
    log_id text NOT NULL,
    epoch bigint NOT NULL,
    writer text NOT NULL,
    seq bigint NOT NULL,
    next_id bigint NOT NULL,
    committed_at bigint NOT NULL,
    takeovers bigint NOT NULL,
    holder text
)
WITH (fillfactor='50');
ALTER TABLE perdure.sessions ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME perdure.sessions_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE perdure.store (
    one boolean DEFAULT true NOT NULL,
    layout integer NOT NULL,
    CONSTRAINT store_one_check CHECK (one)
);
CREATE TABLE perdure.submissions (
    session bigint NOT NULL,
    id bigint NOT NULL,
    conversation_id bigint NOT NULL,
    status text NOT NULL,
    request_id bytea,
    body bytea NOT NULL
);
CREATE TABLE perdure.tasks (
    session bigint NOT NULL,
    id bigint NOT NULL,
    conversation_id bigint NOT NULL,
    kind text NOT NULL,
    live smallint NOT NULL,
    body bytea NOT NULL
);
INSERT INTO perdure.bases VALUES (1, 5, 1, 1, '\x7b227374657073223a5b5d7d');
INSERT INTO perdure.conversations VALUES (1, 1, NULL, NULL, NULL, '\x7b226964223a312c22637265617465645f6174223a3130307d');
INSERT INTO perdure.conversations VALUES (1, 7, 4, 1, 6, '\x7b226964223a372c22637265617465645f6174223a3330302c22706172656e74223a7b22636f6e766572736174696f6e223a312c226174223a367d2c226f776e6572223a347d');
INSERT INTO perdure.deltas VALUES (1, 5, 2, '\x5b5b315d5d');
INSERT INTO perdure.documents VALUES (1, 5, 'conversation', 1, 'plan', '\x', 1, NULL, '\x7b226964223a352c226b696e64223a22706c616e222c2273636f7065223a22636f6e766572736174696f6e222c2273636f70655f6964223a312c22686973746f7279223a22726577696e6461626c65222c22666f726b223a2261735f6f66222c22637265617465645f6174223a3130302c22637265617465645f736571223a317d');
INSERT INTO perdure.entries VALUES (1, 2, 1, 2, '\x7b226964223a322c22736571223a312c22637265617465645f6174223a3130302c22636f6e766572736174696f6e5f6964223a312c226b696e64223a2275736572222c226d65737361676573223a5b7b22726f6c65223a2275736572222c22636f6e74656e74223a2268656c6c6f2c20c3bc626572227d5d2c2264617461223a7b226e756d62657273223a5b312c312e302c747275652c6e756c6c5d7d2c2268656164223a327d');
INSERT INTO perdure.entries VALUES (1, 6, 1, NULL, '\x7b226964223a362c22736571223a322c22637265617465645f6174223a3230302c22636f6e766572736174696f6e5f6964223a312c226b696e64223a22617373697374616e74222c2262795f7461736b223a347d');
INSERT INTO perdure.entries VALUES (1, 8, 7, NULL, '\x7b226964223a382c22736571223a332c22637265617465645f6174223a3330302c22636f6e766572736174696f6e5f6964223a372c226b696e64223a2265646974222c226564697473223a5b7b22656e747279223a327d2c7b22656e747279223a362c227265706c616365223a5b7b22726f6c65223a22617373697374616e74227d5d7d5d7d');
INSERT INTO perdure.mailbox VALUES (1, 2, 'signal', '\x7b22616e737765726564223a66616c73657d', 70, NULL, NULL, NULL);
INSERT INTO perdure.mailbox VALUES (1, 1, 'signal', '\x', 60, 3, 1, '\x22646f6e6522');
INSERT INTO perdure.mailboxes VALUES (1, 2);
INSERT INTO perdure.sessions OVERRIDING SYSTEM VALUE VALUES (1, 'golden', 1, 'golden log', 3, 'golden writer', 3, 11, 300, 0, NULL);
INSERT INTO perdure.store VALUES (true, 1);
INSERT INTO perdure.submissions VALUES (1, 3, 1, 'done', '\x72', '\x7b226964223a332c22636f6e766572736174696f6e5f6964223a312c2274797065223a22696e707574222c22737461747573223a22646f6e65222c22646967657374223a2264222c22637265617465645f6174223a3130302c22726571756573745f6964223a2272222c22656e747279223a322c22616e73776572223a367d');
INSERT INTO perdure.submissions VALUES (1, 9, 7, 'queued', NULL, '\x7b226964223a392c22636f6e766572736174696f6e5f6964223a372c2274797065223a227772697465222c22737461747573223a22717565756564222c22646967657374223a2265222c22637265617465645f6174223a3330307d');
INSERT INTO perdure.tasks VALUES (1, 4, 1, 'turn', 0, '\x7b226964223a342c22636f6e766572736174696f6e5f6964223a312c226b696e64223a227475726e222c2276657273696f6e223a312c22637265617465645f6174223a3130302c227374617465223a7b2274797065223a227465726d696e616c222c226f7574636f6d65223a7b2274797065223a22636f6d706c65746564222c22726573756c74223a7b226f6b223a747275657d7d7d2c226e6f6e6365223a226e222c22737461727465645f6174223a3130302c22656e6465645f6174223a3230307d');
INSERT INTO perdure.tasks VALUES (1, 10, 7, 'turn', 1, '\x7b226964223a31302c22636f6e766572736174696f6e5f6964223a372c226b696e64223a227475726e222c2276657273696f6e223a312c22637265617465645f6174223a3330302c227374617465223a7b2274797065223a2270656e64696e67222c227068617365223a22626567696e227d2c226e6f6e6365223a226d227d');
SELECT pg_catalog.setval('perdure.sessions_id_seq', 1, true);
ALTER TABLE ONLY perdure.bases
    ADD CONSTRAINT bases_pkey PRIMARY KEY (session, document_id, seq);
ALTER TABLE ONLY perdure.contents
    ADD CONSTRAINT contents_pkey PRIMARY KEY (session, digest);
ALTER TABLE ONLY perdure.conversations
    ADD CONSTRAINT conversations_pkey PRIMARY KEY (session, id);
ALTER TABLE ONLY perdure.deltas
    ADD CONSTRAINT deltas_pkey PRIMARY KEY (session, document_id, seq);
ALTER TABLE ONLY perdure.documents
    ADD CONSTRAINT documents_pkey PRIMARY KEY (session, id);
ALTER TABLE ONLY perdure.entries
    ADD CONSTRAINT entries_pkey PRIMARY KEY (session, id);
ALTER TABLE ONLY perdure.mailbox
    ADD CONSTRAINT mailbox_pkey PRIMARY KEY (session, id);
ALTER TABLE ONLY perdure.mailboxes
    ADD CONSTRAINT mailboxes_pkey PRIMARY KEY (session);
ALTER TABLE ONLY perdure.pins
    ADD CONSTRAINT pins_pkey PRIMARY KEY (session, pin, digest);
ALTER TABLE ONLY perdure.sessions
    ADD CONSTRAINT sessions_name_key UNIQUE (name);
ALTER TABLE ONLY perdure.sessions
    ADD CONSTRAINT sessions_pkey PRIMARY KEY (id);
ALTER TABLE ONLY perdure.store
    ADD CONSTRAINT store_pkey PRIMARY KEY (one);
ALTER TABLE ONLY perdure.submissions
    ADD CONSTRAINT submissions_pkey PRIMARY KEY (session, id);
ALTER TABLE ONLY perdure.tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (session, id);
CREATE INDEX conversations_by_owner ON perdure.conversations USING btree (session, owner, id);
CREATE INDEX conversations_forks ON perdure.conversations USING btree (session, parent) WHERE (parent IS NOT NULL);
CREATE UNIQUE INDEX documents_alive ON perdure.documents USING btree (session, scope, scope_id, kind, sha256(key)) WHERE (retired_seq IS NULL);
CREATE INDEX documents_by_address ON perdure.documents USING btree (session, scope, scope_id, kind, sha256(key), id);
CREATE INDEX entries_by_conversation ON perdure.entries USING btree (session, conversation_id, id);
CREATE INDEX entries_heads ON perdure.entries USING btree (session, conversation_id, id) WHERE (head IS NOT NULL);
CREATE INDEX mailbox_answered ON perdure.mailbox USING btree (session, answered_seq, id) WHERE (answered_seq IS NOT NULL);
CREATE INDEX mailbox_waiting ON perdure.mailbox USING btree (session, id) WHERE (answered_seq IS NULL);
CREATE INDEX pins_by_digest ON perdure.pins USING btree (session, digest);
CREATE INDEX submissions_by_conversation ON perdure.submissions USING btree (session, conversation_id, id);
CREATE UNIQUE INDEX submissions_by_request ON perdure.submissions USING btree (session, conversation_id, sha256(request_id)) WHERE (request_id IS NOT NULL);
CREATE INDEX submissions_open ON perdure.submissions USING btree (session, status, id) WHERE (status = ANY (ARRAY['queued'::text, 'placed'::text]));
CREATE INDEX tasks_by_conversation ON perdure.tasks USING btree (session, conversation_id, id);
CREATE INDEX tasks_by_kind ON perdure.tasks USING btree (session, kind, id);
CREATE INDEX tasks_live ON perdure.tasks USING btree (session, id) WHERE (live = 1);
