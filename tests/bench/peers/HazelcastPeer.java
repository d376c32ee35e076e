package peers;

import com.hazelcast.config.Config;
import com.hazelcast.core.Hazelcast;
import com.hazelcast.core.HazelcastInstance;
import com.hazelcast.function.FunctionEx;
import com.hazelcast.jet.Job;
import com.hazelcast.jet.Traverser;
import com.hazelcast.jet.Traversers;
import com.hazelcast.jet.aggregate.AggregateOperations;
import com.hazelcast.jet.config.JobConfig;
import com.hazelcast.jet.config.ProcessingGuarantee;
import com.hazelcast.jet.core.AbstractProcessor;
import com.hazelcast.jet.core.BroadcastKey;
import com.hazelcast.jet.core.EventTimeMapper;
import com.hazelcast.jet.core.EventTimePolicy;
import com.hazelcast.jet.core.ProcessorMetaSupplier;
import com.hazelcast.jet.core.ProcessorSupplier;
import com.hazelcast.jet.core.metrics.Measurement;
import com.hazelcast.jet.datamodel.KeyedWindowResult;
import com.hazelcast.jet.datamodel.Tuple2;
import com.hazelcast.jet.pipeline.BatchSource;
import com.hazelcast.jet.pipeline.Pipeline;
import com.hazelcast.jet.pipeline.Sink;
import com.hazelcast.jet.pipeline.Sinks;
import com.hazelcast.jet.pipeline.SourceBuilder;
import com.hazelcast.jet.pipeline.Sources;
import com.hazelcast.jet.pipeline.StreamSource;
import com.hazelcast.jet.pipeline.WindowDefinition;
import com.sun.management.OperatingSystemMXBean;
import java.io.IOException;
import java.io.Serializable;
import java.lang.management.ManagementFactory;
import java.nio.ByteOrder;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Paths;
import java.nio.file.StandardOpenOption;
import java.util.Locale;

/**
 * A job of the bench on Hazelcast: one member in this JVM, two threads, exactly-once snapshots in memory.
 *
 * <p>{@code HazelcastPeer JOB INPUT OUT CHECKPOINT_MILLIS}; JOB is a name of {@code tests.bench.suite}. It reads
 * INPUT/rows.bin and writes CSV below OUT/win. Late rows are counted, not kept. It prints one line of JSON. Time counts from
 * a member that has run a trivial job.
 */
public final class HazelcastPeer {
    private static final int RECORD = 32;

    /** A row of the input. */
    public static final class Event implements Serializable {
        final long time;
        final long seq;
        final int source;
        final int key;
        final double value;

        Event(long time, long seq, int source, int key, double value) {
            this.time = time;
            this.seq = seq;
            this.source = source;
            this.key = key;
            this.value = value;
        }
    }

    /**
     * A source that ends and can be replayed: instance i of n reads blocks i, i + n and so on; its snapshot is its position.
     *
     * <p>Streams of {@code SourceBuilder} may not end.
     */
    private static final class Reader extends AbstractProcessor {
        private static final int BLOCK = 2000;
        /** Bytes in a mapping; a multiple of the record's size. */
        private static final long SEGMENT = 1L << 29;

        private final String path;
        private final EventTimePolicy<? super Event> policy;
        private MappedByteBuffer[] segments;
        private long rows;
        private long block;
        private int offset;
        private int instance;
        private int instances;
        private EventTimeMapper<Event> mapper;
        private Traverser<Object> pending = Traversers.empty();

        Reader(String path, EventTimePolicy<? super Event> policy) {
            this.path = path;
            this.policy = policy;
        }

        @Override
        protected void init(Context context) throws IOException {
            instance = context.globalProcessorIndex();
            instances = context.totalParallelism();
            block = instance;
            mapper = new EventTimeMapper<>(policy);
            mapper.addPartitions(1);
            try (FileChannel file = FileChannel.open(Paths.get(path), StandardOpenOption.READ)) {
                rows = file.size() / RECORD;
                segments = new MappedByteBuffer[(int) ((file.size() + SEGMENT - 1) / SEGMENT)];
                for (int i = 0; i < segments.length; i++) {
                    long size = Math.min(SEGMENT, file.size() - i * SEGMENT);
                    segments[i] = file.map(FileChannel.MapMode.READ_ONLY, i * SEGMENT, size);
                    segments[i].order(ByteOrder.LITTLE_ENDIAN);
                }
            }
        }

        @Override
        public boolean complete() {
            for (int count = 0; count < 1024; count++) {
                if (!emitFromTraverser(pending)) {
                    return false;
                }
                long row = block * BLOCK + offset;
                if (row >= rows) {
                    return true;
                }
                MappedByteBuffer bytes = segments[(int) (row * RECORD / SEGMENT)];
                int at = (int) (row * RECORD % SEGMENT);
                Event event = new Event(
                        bytes.getLong(at), bytes.getLong(at + 16), bytes.getInt(at + 24), bytes.getInt(at + 28), bytes.getDouble(at + 8));
                pending = mapper.flatMapEvent(event, 0, Math.floorDiv(event.time, 1000));
                if (++offset == BLOCK) {
                    offset = 0;
                    block += instances;
                }
            }
            return false;
        }

        @Override
        public boolean saveToSnapshot() {
            // What was read must be out before the position is saved.
            return emitFromTraverser(pending)
                    && tryEmitToSnapshot(BroadcastKey.broadcastKey(instance), new long[] {block, offset, mapper.getWatermark(0)});
        }

        @Override
        protected void restoreFromSnapshot(Object key, Object value) {
            if (((BroadcastKey<?>) key).key().equals(instance)) {
                long[] position = (long[]) value;
                block = position[0];
                offset = (int) position[1];
                mapper.restoreWatermark(0, position[2]);
            }
        }
    }

    private static <T> Sink<T> sink(String out, FunctionEx<? super T, String> format) {
        return Sinks.<T>filesBuilder(out + "/win").toStringFn(format).exactlyOnce(true).build();
    }

    private static WindowDefinition window(String job) {
        return switch (job) {
            case "sliding" -> WindowDefinition.sliding(60_000, 10_000);
            case "sessions" -> WindowDefinition.session(1_000);
            default -> WindowDefinition.tumbling(10_000);
        };
    }

    private static Pipeline build(String job, String path, String out) {
        StreamSource<Event> source = Sources.streamFromProcessorWithWatermarks("rows", true,
                policy -> ProcessorMetaSupplier.of(2, ProcessorSupplier.of(() -> new Reader(path, policy))));
        Pipeline pipeline = Pipeline.create();
        if (job.equals("pass")) {
            pipeline.readFrom(source).withoutTimestamps().setLocalParallelism(2)
                    .writeTo(sink(out, e -> e.source + "," + e.seq + "," + e.time + "," + e.key + "," + e.value)).setLocalParallelism(2);
            return pipeline;
        }
        // It has no revisions: for "keys" its watermark is later by the lateness.
        pipeline.readFrom(source).withNativeTimestamps(job.equals("keys") ? 190_000 : 10_000).setLocalParallelism(2)
                .groupingKey(e -> e.key).window(window(job))
                .aggregate(AggregateOperations.allOf(AggregateOperations.counting(), AggregateOperations.summingDouble(e -> e.value)))
                .writeTo(HazelcastPeer.<KeyedWindowResult<Integer, Tuple2<Long, Double>>>sink(out,
                        w -> w.start() * 1000 + "," + w.key() + "," + w.result().f0() + "," + w.result().f1())).setLocalParallelism(2);
        return pipeline;
    }

    private static HazelcastInstance startMember() {
        Config config = new Config();
        config.getJetConfig().setEnabled(true).setCooperativeThreadCount(2);
        config.setProperty("hazelcast.logging.type", "none").setProperty("hazelcast.phone.home.enabled", "false")
                .setProperty("hazelcast.partition.count", "11");
        config.getMetricsConfig().setCollectionFrequencySeconds(1);
        config.getNetworkConfig().getJoin().getMulticastConfig().setEnabled(false);
        config.getNetworkConfig().getJoin().getAutoDetectionConfig().setEnabled(false);
        config.getNetworkConfig().getInterfaces().setEnabled(true).addInterface("127.0.0.1");
        return Hazelcast.newHazelcastInstance(config);
    }

    private static double cpuSeconds() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }

    private static long peakMegabytes() throws IOException {
        for (String line : Files.readAllLines(Paths.get("/proc/self/status"))) {
            if (line.startsWith("VmHWM")) {
                return Long.parseLong(line.replaceAll("\\D", "")) / 1024;
            }
        }
        return 0;
    }

    public static void main(String[] given) throws Exception {
        String job = given[0], path = given[1] + "/rows.bin", out = given[2];
        HazelcastInstance member = startMember();
        BatchSource<Integer> one = SourceBuilder.batch("warm", context -> new int[1]).<Integer>fillBufferFn((state, buffer) -> {
            buffer.add(1);
            buffer.close();
        }).build();
        Pipeline warm = Pipeline.create();
        warm.readFrom(one).writeTo(Sinks.noop());
        member.getJet().newJob(warm).join();
        Pipeline pipeline = build(job, path, out);
        long begun = System.nanoTime();
        double spent = cpuSeconds();
        Job running = member.getJet().newJob(pipeline, new JobConfig().setName(job).setStoreMetricsAfterJobCompletion(true)
                .setProcessingGuarantee(ProcessingGuarantee.EXACTLY_ONCE).setSnapshotIntervalMillis(Long.parseLong(given[3])));
        running.join();
        double seconds = (System.nanoTime() - begun) / 1e9, cpu = cpuSeconds() - spent;
        long late = running.getMetrics().get("lateEventsDropped").stream().mapToLong(Measurement::value).sum();
        System.out.printf(Locale.ROOT, "{\"seconds\": %.2f, \"cpu\": %.2f, \"peak_mb\": %d, \"late\": %d}%n",
                seconds, cpu, peakMegabytes(), late);
        System.out.flush();
        Runtime.getRuntime().halt(0);
    }
}
